// The page of the API, made of /openapi.json.

const LONGEST_SHOWN = 20_000;

const key = keyForm(load);

async function load() {
  const trouble = byId("trouble");
  let answer;
  try {
    answer = await ask("/openapi.json");
  } catch {
    trouble.hidden = false;
    say(trouble, "The server does not answer. Load this page again once it does.");
    return;
  }
  if (answer.status === 401) {
    key.open();
    return;
  }
  const description = await answer.json();
  trouble.hidden = answer.ok;
  if (!answer.ok) {
    say(trouble, `No description: ${description.error.message}.`);
    return;
  }
  byId("raw").hidden = sessionStorage.getItem(KEY_NAME) !== null; // a link sends no key
  show(description);
}

function show(description) {
  components = description.components;
  say(byId("version"), description.info.version);
  byId("about").replaceChildren(...prose(description.info.description));
  const operations = collect(description);
  byId("contents").replaceChildren(...description.tags.flatMap(({ name }) => [
    make("h2", {}, name),
    ...operations.filter((one) => one.tags.includes(name)).map((one) => make("a", { href: `#${one.operationId}`, title: one.summary }, one.path)),
  ]));
  byId("operations").replaceChildren(...operations.map((one) => article(one, description)));
  if (location.hash) byId(location.hash.slice(1))?.scrollIntoView();
}

/** Every operation once, with the other paths that do the same. */
function collect(description) {
  const all = Object.entries(description.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({ ...operation, path, method: method.toUpperCase() })));
  for (const each of all) each.aliases = all.filter((other) => other["x-alias-of"] === each.path && other.method === each.method).map((other) => other.path);
  return all.filter((each) => !each["x-alias-of"]);
}

/** Text with what stands between backticks as code. */
function prose(text) {
  return text.split("`").map((part, index) => (index % 2 ? make("code", {}, part) : part));
}

function article(operation, description) {
  const answer = operation.responses["200"];
  const json = answer.content["application/json"];
  const isPage = "text/html" in answer.content;
  const body = operation.requestBody && operation.requestBody.content["application/json"];
  const isOpen = !description.security || (operation.security && operation.security.length === 0);
  const also = operation.aliases.length ? `Also ${operation.aliases.join(", ")}. ` : "";
  const fields = json ? fieldsOf(json.schema) : [];
  return make("article", { id: operation.operationId },
    make("h2", {}, make("span", { class: "method" }, operation.method), make("code", {}, operation.path), make("span", {}, operation.summary)),
    make("p", {}, ...prose(operation.description)),
    make("p", { class: "aside" }, also + (isOpen ? "No key is needed." : "Needs an API key.")),
    body ? make("h3", {}, "Request") : null,
    body ? fieldTable(fieldsOf(body.schema), true) : null,
    isPage ? null : make("h3", {}, "Try it from a shell"),
    isPage ? null : curl(operation, body, isOpen),
    isPage ? null : tryIt(operation, body),
    fields.length ? make("h3", {}, "Answer") : null,
    fields.length ? fieldTable(fields, false) : null,
    fields.length ? make("details", {}, make("summary", {}, "Example"), make("pre", {}, JSON.stringify(sample(json.schema), null, 2))) : null,
    make("details", {}, make("summary", {}, "Statuses and headers"), statusTable(operation), headerTable(answer)),
  );
}

function fieldTable(fields, isRequest) {
  const rows = fields.map(([path, schema, isRequired]) => {
    const words = resolve(schema).description || schema.description;
    const mark = isRequest === isRequired ? make("span", { class: "must" }, isRequest ? "required" : "") : null;
    const sometimes = !isRequest && !isRequired ? make("span", { class: "must" }, "sometimes") : null;
    const isText = words && !schema.$ref;
    return make("tr", {}, make("th", { scope: "row" }, make("code", {}, path), " ", mark, sometimes),
      make("td", {}, make("span", { class: "kind" }, typeWords(schema)), isText ? make("span", {}, ...prose(words)) : null));
  });
  return make("table", { class: "fields" }, make("tbody", {}, ...rows));
}

function statusTable(operation) {
  const rows = Object.entries(operation.responses).map(([status, answer]) =>
    make("tr", {}, make("th", { scope: "row" }, status), make("td", {}, ...prose(resolve(answer).description))));
  return make("table", { class: "statuses" }, make("tbody", {}, ...rows));
}

function headerTable(answer) {
  const rows = Object.entries(answer.headers).map(([name, header]) =>
    make("tr", {}, make("th", { scope: "row" }, make("code", {}, name)), make("td", {}, resolve(header).description)));
  return make("table", { class: "fields" }, make("tbody", {}, ...rows));
}

function pathOf(operation) {
  return (operation.parameters || []).reduce((path, parameter) => path.replace(`{${parameter.name}}`, parameter.example), operation.path);
}

function curl(operation, body, isOpen) {
  const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const lines = [`curl ${quote(location.origin + BASE + pathOf(operation))}`];
  if (!isOpen) lines.push('-H "Authorization: Bearer $PACKHORSE_KEY"');
  if (body) lines.push("-H 'Content-Type: application/json'", `-d ${quote(JSON.stringify(body.example, null, 2))}`);
  const text = lines.join(" \\\n  ");
  const button = make("button", { type: "button" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      say(button, "Copied");
    } catch { // without HTTPS a page may not write there
      getSelection().selectAllChildren(button.previousSibling);
      say(button, "Selected");
    }
    setTimeout(() => say(button, "Copy"), 2000);
  });
  return make("div", { class: "copy" }, make("pre", { tabindex: "0" }, text), button);
}

function tryIt(operation, body) {
  const id = `try-${operation.operationId}`;
  const address = make("input", { value: pathOf(operation), spellcheck: "false" });
  const example = body ? JSON.stringify(body.example, null, 2) : "";
  const text = body ? make("textarea", { spellcheck: "false", rows: example.split("\n").length }, example) : null;
  const outcome = make("p", { class: "outcome", role: "status" });
  const shown = make("pre", { tabindex: "0", "aria-label": "Answer", hidden: "" });
  const form = make("form", { class: "try", id },
    operation.parameters ? make("label", {}, "Path", address) : null,
    text ? make("label", {}, "Body", text) : null,
    make("div", { class: "send" }, make("button", { type: "submit" }, "Send"), outcome), make("div", { class: "answer" }, shown));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    say(outcome, "…");
    const began = performance.now();
    const options = text ? { method: operation.method, body: text.value, headers: { "content-type": "application/json" } } : {};
    try {
      const answer = await ask(address.value, options);
      const content = await answer.text();
      const tookMs = Math.round(performance.now() - began);
      outcome.className = answer.ok ? "outcome" : "outcome bad";
      say(outcome, `${answer.status} in ${tookMs} ms, ${content.length.toLocaleString("en-GB")} characters, request ${answer.headers.get("x-request-id") || "?"}`);
      shown.hidden = false;
      say(shown, pretty(content));
      if (answer.status === 401) key.open();
    } catch {
      outcome.className = "outcome bad";
      say(outcome, "The server did not answer.");
    }
  });
  return make("details", {}, make("summary", {}, "Try it here"), form);
}

function pretty(content) {
  let text = content;
  try {
    text = JSON.stringify(JSON.parse(content), null, 1).replace(/\[\s+(-?[\d.eE+-]+,\s+)+-?[\d.eE+-]+\s+\]/g, (list) => list.replace(/\s+/g, " "));
  } catch { /* it is no JSON, and shown as it came */ }
  return text.length > LONGEST_SHOWN ? `${text.slice(0, LONGEST_SHOWN)}\n… and ${text.length - LONGEST_SHOWN} characters more` : text;
}

load();
