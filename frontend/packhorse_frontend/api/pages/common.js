"use strict";

// Where the API is: the page's own address without its path, so that a proxy's prefix stays.
const BASE = location.pathname.replace(/\/+$/, "").replace(new RegExp(`${document.documentElement.dataset.path}$`), "");
const KEY_NAME = "packhorse-api-key";

const byId = (id) => document.getElementById(id);

/** Change a text only where it is another one, so that selections and screen readers are left in peace. */
function say(node, text) {
  if (node.textContent !== String(text)) node.textContent = text;
}

/** An element. Whatever is put into it is text: names of models and devices are data, never markup. */
function make(tag, attributes, ...children) {
  const node = tag === "svg" || tag === "path" || tag === "line"
    ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** fetch() below the API, with the key of this tab. */
function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY_NAME);
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  return fetch(BASE + path, { cache: "no-store", credentials: "same-origin", ...options, headers });
}

/** The form that asks for a key: `open` shows it, and `onKey` is called with every new one. */
function keyForm(onKey) {
  const form = byId("key");
  const field = byId("key-field");
  const note = byId("key-note");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const key = field.value.trim();
    if (!/^[\x21-\x7e]+$/.test(key)) {
      note.className = "wrong";
      say(note, "A key is made of printable ASCII characters, with no spaces.");
      return;
    }
    sessionStorage.setItem(KEY_NAME, key);
    field.value = "";
    form.hidden = true;
    onKey();
  });
  return {
    open() {
      const isWrong = sessionStorage.getItem(KEY_NAME) !== null;
      sessionStorage.removeItem(KEY_NAME);
      if (!form.hidden && !isWrong) return;
      form.hidden = false;
      note.className = isWrong ? "wrong" : "";
      say(note, isWrong ? "The server does not take this key." : "It is kept in this tab only, until the tab is closed.");
      field.focus();
    },
  };
}

for (const link of document.querySelectorAll("a[data-to]")) link.href = BASE + link.dataset.to;
