// What the page shows of a report of /status and of the metrics: one function for each part.

const TASKS = {
  embedding: "text embedding",
  classify: "classification",
  reward: "reward",
  token_reward: "reward for each token",
  rerank: "reranking",
};
const WORKER_TONES = { loading: "warn", ready: "good", busy: "busy", draining: "warn", gone: "bad" };
const STAGES = [
  ["Whole request", "", "packhorse_request_seconds"],
  ["Tokenizing", "a request", "packhorse_tokenize_seconds"],
  ["In the queue", "an input", "packhorse_queue_wait_seconds"],
  ["In the model", "a batch", "packhorse_encode_seconds"],
];
const STATUSES = {
  400: "invalid request",
  401: "wrong API key",
  403: "origin not allowed",
  404: "no such model or path",
  405: "method not allowed",
  408: "request came too slowly",
  413: "body too large",
  415: "unknown coding of the body",
  431: "head too large",
  499: "client left before its answer",
  500: "failed in the server",
  504: "timeout",
};
const COUNTS = [
  ["inputs tried again", "packhorse_retries_total"],
  ["silences of workers", "packhorse_worker_silences_total"],
  ["wrong answers to the canary", "packhorse_canary_failures_total"],
  ["malformed messages", "packhorse_malformed_messages_total"],
];

const charts = {
  queue: new Chart(byId("queue-chart"), "Waiting inputs", { write: writeCount, least: 10 }),
  inputs: new Chart(byId("inputs-chart"), "Inputs a second", { write: writeRate, least: 10 }),
  tokens: new Chart(byId("tokens-chart"), "Tokens a second", { write: writeRate, least: 100 }),
  fill: new Chart(byId("fill-chart"), "Batch fill", { write: writeShare, least: 1, most: 1 }),
  latency: new Chart(byId("latency-chart"), "Request time, half of them and 99 %", { lines: 2, write: writeSeconds, least: 0.01 }),
};

function showModel(report) {
  const model = report.model;
  say(byId("version"), report.version);
  say(byId("model"), model ? model.name : "no model yet");
  document.title = model ? `${model.name} · Packhorse` : "Packhorse";
  say(byId("task"), model ? TASKS[model.task] || model.task : "–");
  say(byId("dimension"), model ? writeCount(model.dimension) : "–");
  say(byId("longest"), model ? `${writeCount(model.max_seq_len)} tokens` : "–");
  say(byId("dtype"), model ? model.dtype : "–");
  const able = report.workers.filter((worker) => worker.state === "ready" || worker.state === "busy").length;
  byId("worker-count").dataset.tone = able === report.workers.length ? "" : "warn";
  say(byId("worker-count"), report.workers.length === able ? able : `${able} of ${report.workers.length}`);
}

function showQueue(report, at) {
  const queue = report.queue;
  say(byId("queue"), writeCount(queue.inputs));
  say(byId("queue-limit"), `of ${writeCount(queue.limit)} inputs`);
  const oldest = queue.inputs ? `, oldest ${writeSeconds(queue.oldest_wait_ms / 1000)}` : "";
  say(byId("queue-sub"), `${writeCount(queue.requests)} request${queue.requests === 1 ? "" : "s"}${oldest}`);
  charts.queue.add(at, queue.inputs);
}

function showRates(report, at) {
  const rates = report.rates;
  say(byId("inputs"), writeRate(rates.inputs_per_s));
  say(byId("inputs-sub"), `in ${writeRate(rates.requests_per_s)} requests a second`);
  say(byId("tokens"), writeRate(rates.tokens_per_s));
  const each = rates.inputs_per_s > 0 ? `${writeRate(rates.tokens_per_s / rates.inputs_per_s)} tokens an input` : "\u00a0";
  say(byId("tokens-sub"), each);
  charts.inputs.add(at, rates.inputs_per_s);
  charts.tokens.add(at, rates.tokens_per_s);
}

/** `recent`: what grew in the last seconds, null where that is not known. */
function showFill(recent, seconds, at) {
  const fill = recent && mean(recent, "packhorse_batch_fill_ratio");
  say(byId("fill"), fill === null ? "–" : writeShare(fill));
  const batches = recent ? total(recent, "packhorse_batch_inputs_count") / seconds : 0;
  say(byId("fill-unit"), fill === null ? "" : `${writeRate(batches)} batches/s`);
  const sizes = fill === null ? "no batch in the last seconds"
    : `${writeRate(mean(recent, "packhorse_batch_inputs"))} inputs, ${writeRate(mean(recent, "packhorse_batch_tokens"))} tokens each`;
  say(byId("fill-sub"), sizes);
  charts.fill.add(at, fill);
}

function showLatency(window, recent, at) {
  const rows = STAGES.map(([stage, of, name]) => {
    const cells = [0.5, 0.9, 0.99].map((q) => (window ? writeQuantile(quantile(window, name, q)) : "–"));
    return { key: name, cells: [[stage, of], ...cells] };
  });
  showRows(byId("latency"), rows, (stage) => [stage[0], make("small", {}, stage[1] ? ` of ${stage[1]}` : "")]);
  const point = (q) => {
    const found = recent && quantile(recent, "packhorse_request_seconds", q);
    return found ? found.value : null;
  };
  charts.latency.add(at, point(0.5), point(0.99));
}

function showTrouble(all, minute) {
  const lines = [];
  const byLabel = (name, label, word) => {
    const grown = totalsBy(minute || [], name, label);
    for (const [value, count] of totalsBy(all, name, label)) lines.push([word(value), grown.get(value) || 0, count]);
  };
  const plain = (value) => value.replaceAll("_", " ");
  byLabel("packhorse_rejected_total", "reason", (reason) => `refused: ${plain(reason)}`);
  byLabel("packhorse_failed_total", "reason", (reason) => `failed: ${plain(reason)}`);
  byLabel("packhorse_requests_total", "status", (status) => STATUSES[status] && `${status}: ${STATUSES[status]}`);
  byLabel("packhorse_worker_exits_total", "how", (how) => how !== "left" && `workers ${how}`);
  for (const [word, name] of COUNTS) lines.push([word, total(minute || [], name), total(all, name)]);
  const seen = lines.filter(([word, , count]) => word && count > 0).sort((a, b) => b[1] - a[1] || b[2] - a[2]);
  showRows(byId("trouble"), seen.map(([word, last, count]) => ({ key: word, cells: [word, minute ? writeCount(last) : "–", writeCount(count)] })));
  byId("trouble-table").hidden = seen.length === 0;
  byId("trouble-none").hidden = seen.length > 0;
  say(byId("trouble-none"), "Nothing was refused and nothing failed since the start.");
}

/** Without metrics these parts are empty, and say why. */
function showNoMetrics(why, at) {
  showFill(null, 1, at);
  showLatency(null, null, at);
  byId("trouble-table").hidden = true;
  byId("trouble-none").hidden = false;
  say(byId("trouble-none"), why);
}

/** Rows of a table by their key: those that are there already are changed, so that nothing jumps. */
function showRows(body, rows, writeHead = (head) => [head]) {
  const known = new Map([...body.children].map((row) => [row.dataset.key, row]));
  rows.forEach(({ key, cells }, place) => {
    let row = known.get(key);
    known.delete(key);
    if (!row) {
      row = make("tr", { "data-key": key }, make("th", { scope: "row" }, ...writeHead(cells[0])), ...cells.slice(1).map(() => make("td")));
    }
    if (body.children[place] !== row) body.insertBefore(row, body.children[place] || null);
    cells.slice(1).forEach((text, index) => say(row.children[index + 1], text));
  });
  for (const row of known.values()) row.remove();
}

/** Inputs a second of each worker, from its counters of some seconds ago. */
function workerRates(report, before, seconds) {
  const then = new Map((before ? before.workers : []).map((worker) => [`${worker.id} ${worker.pid}`, worker.inputs]));
  return report.workers.map((worker) => {
    const inputs = then.get(`${worker.id} ${worker.pid}`);
    return inputs === undefined || seconds <= 0 || worker.inputs < inputs ? null : (worker.inputs - inputs) / seconds;
  });
}

function showWorkers(report, rates) {
  const body = byId("workers");
  const known = new Map([...body.children].map((row) => [row.dataset.key, row]));
  report.workers.forEach((worker, place) => {
    const key = `${worker.id} ${worker.pid}`;
    const row = known.get(key) || makeWorkerRow(key, worker);
    known.delete(key);
    if (body.children[place] !== row) body.insertBefore(row, body.children[place] || null);
    fillWorkerRow(row, worker, rates[place]);
  });
  for (const row of known.values()) row.remove();
  byId("no-workers").hidden = report.workers.length > 0;
}

const WORKER_CELLS = ["Device", "State", "Busy", "Memory", "At hand", "Inputs/s", "Inputs", "Tokens", "Batches"];

function makeWorkerRow(key, worker) {
  const cells = WORKER_CELLS.map((name) => make("td", { "data-name": name }));
  cells[0].className = "device";
  cells[1].append(make("span", { class: "worker-state" }));
  cells[2].className = "busy-cell";
  cells[2].append(make("span", { class: "busy" }, make("i", { "aria-hidden": "true" }, make("i")), make("span")));
  return make("tr", { "data-key": key }, make("th", { scope: "row", title: `pid ${worker.pid}` }, worker.id), ...cells);
}

function fillWorkerRow(row, worker, rate) {
  row.className = worker.state === "gone" ? "gone" : "";
  const [device, state, busy, memory, inFlight, perSecond, inputs, tokens, batches] = [...row.children].slice(1);
  say(device, worker.device);
  device.title = worker.device;
  state.firstChild.dataset.tone = WORKER_TONES[worker.state] || "idle";
  say(state.firstChild, worker.state);
  const share = Math.max(0, Math.min(1, worker.busy));
  busy.querySelector("i i").style.transform = `scaleX(${share})`;
  say(busy.querySelector("span span"), writeShare(share));
  say(memory, writeBytes(worker.memory_bytes));
  say(inFlight, writeCount(worker.in_flight));
  say(perSecond, rate === null ? "–" : writeRate(rate));
  say(inputs, writeCount(worker.inputs));
  say(tokens, writeCount(worker.tokens));
  say(batches, writeCount(worker.batches));
}
