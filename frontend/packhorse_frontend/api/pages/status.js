// Asks the server every second while somebody looks, and says how old the answer is.

const EVERY_MS = 1000;
const HIDDEN_MS = 15_000;
const SLOWEST_RETRY_MS = 8000;
const PATIENCE_MS = 5000;
const OLD_MS = 4000;
const RECENT_S = 5;
const LATENCY_S = 30;
const KEPT_S = 65;
const STATES = {
  loading: ["loading", "warn"],
  no_worker: ["no worker", "bad"],
  draining: ["stopping", "warn"],
};

const moments = []; // {at, report, metrics}: the last minute, oldest first
let failures = 0;
let timer = null;
let isAsking = false;
let isPaused = false;
let lacksKey = false;
let lastAnswerAt = null;

const key = keyForm(() => {
  lacksKey = false;
  askNow();
});

/** An answer of the API: `{status, body}` with JSON or text, and 0 for the status where none came. */
async function look(path) {
  try {
    const answer = await ask(path, { signal: AbortSignal.timeout(PATIENCE_MS) });
    const isJson = (answer.headers.get("content-type") || "").includes("json");
    return { status: answer.status, body: isJson ? await answer.json() : await answer.text() };
  } catch {
    return { status: 0, body: null };
  }
}

async function askOnce() {
  const [status, metrics, health] = await Promise.all([look("/status"), look("/metrics"), look("/health")]);
  const at = Date.now();
  showState(status, health);
  lacksKey = status.status === 401;
  byId("numbers").hidden = lacksKey && lastAnswerAt === null;
  if (lacksKey) {
    key.open();
    return false;
  }
  if (status.status !== 200) return false;
  byId("key").hidden = true;
  byId("metrics-link").hidden = sessionStorage.getItem(KEY_NAME) !== null; // a link sends no key
  lastAnswerAt = at;
  const found = metrics.status === 200 ? readMetrics(metrics.body) : null;
  const reason = metrics.body && metrics.body.error;
  moments.push({ at, report: status.body, metrics: found, why: reason ? `No metrics: ${reason.message}.` : "No metrics: no answer." });
  while (moments[0].at < at - 1000 * KEPT_S) moments.shift();
  showNumbers(moments[moments.length - 1]);
  return true;
}

/** The youngest moment that is so many seconds old, else the oldest one; null for the present one alone. */
function momentBefore(now, seconds, isFit) {
  const older = moments.filter((moment) => moment !== now && isFit(moment));
  return older.findLast((moment) => now.at - moment.at >= 1000 * seconds - 100) || older[0] || null;
}

function showNumbers(now) {
  const { at, report, metrics } = now;
  showModel(report);
  showQueue(report, at);
  showRates(report, at);
  const before = momentBefore(now, RECENT_S, () => true);
  showWorkers(report, workerRates(report, before && before.report, before ? (at - before.at) / 1000 : 0));
  if (!metrics) {
    showNoMetrics(now.why, at);
    return;
  }
  const since = (seconds) => {
    const then = momentBefore(now, seconds, (moment) => moment.metrics !== null);
    return then && { grown: growth(metrics, then.metrics), seconds: (at - then.at) / 1000 };
  };
  const [recent, window, minute] = [since(RECENT_S), since(LATENCY_S), since(60)];
  showFill(recent && recent.grown, recent ? recent.seconds : 1, at);
  showLatency(window && window.grown, recent && recent.grown, at);
  showTrouble([...metrics.values()], minute && minute.grown);
}

function showState(status, health) {
  const notice = byId("notice");
  const reason = health.body && health.body.error;
  const trouble = status.body && status.body.error;
  let [word, tone] = ["serving", "good"];
  let told = "";
  if (health.status === 0 && status.status === 0) {
    [word, tone] = ["no answer", "bad"];
    told = "The server does not answer.";
  } else if (health.status !== 200) {
    [word, tone] = (reason && STATES[reason.code]) || ["out of order", "bad"];
    told = reason ? `New requests are refused: ${reason.message}.` : "";
  } else if (status.status === 200 && status.body.queue.inputs >= status.body.queue.limit) {
    [word, tone] = ["queue full", "warn"];
    told = "The queue is full: new requests get 429 (--max_queue_size).";
  }
  if (status.status !== 200 && status.status !== 401 && trouble) told = `No numbers: ${trouble.message}.`;
  say(byId("state-word"), word);
  byId("state").dataset.tone = tone;
  notice.hidden = told === "";
  say(notice, told);
}

/** How old the numbers are. */
function showAge() {
  const age = byId("age");
  const time = lastAnswerAt === null ? "" : new Date(lastAnswerAt).toLocaleTimeString();
  const isOld = lastAnswerAt !== null && !isPaused && !document.hidden && Date.now() - lastAnswerAt > OLD_MS;
  age.classList.toggle("old", isOld);
  byId("numbers").classList.toggle("old", isOld || lastAnswerAt === null);
  if (lastAnswerAt === null) say(age, lacksKey ? "waiting for a key" : "no numbers yet");
  else if (isPaused) say(age, `paused at ${time}`);
  else if (isOld) say(age, `numbers are ${Math.round((Date.now() - lastAnswerAt) / 1000)} s old`);
  else say(age, `as of ${time}`);
}

async function askNow() {
  clearTimeout(timer);
  if (isAsking || isPaused || lacksKey) return;
  isAsking = true;
  try {
    failures = (await askOnce()) ? 0 : failures + 1;
  } finally {
    isAsking = false;
    showAge();
    const pause = failures ? Math.min(EVERY_MS * 2 ** (failures - 1), SLOWEST_RETRY_MS) : EVERY_MS;
    timer = setTimeout(askNow, document.hidden ? HIDDEN_MS : pause);
  }
}

byId("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  say(byId("pause"), isPaused ? "Go on" : "Pause");
  showAge();
  askNow();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) askNow();
});
setInterval(showAge, 500);
askNow();
