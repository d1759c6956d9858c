// JSON Schema in words: what a field takes, and an example of a value.

let components = {};

/** The schema itself, where only its place is given. */
function resolve(schema) {
  return schema.$ref ? resolve(schema.$ref.split("/").slice(1).reduce((part, name) => part[name], { components })) : schema;
}

function kindsOf(schema) {
  const found = resolve(schema);
  return (found.anyOf || [found]).map(resolve).filter((kind) => kind.type !== "null");
}

/** A type in words, such as `text or list of 1 to 2,048 texts`. */
function typeWords(schema) {
  const kinds = kindsOf(schema).map((kind) => oneType(kind));
  return kinds.length ? kinds.join(" or ") : "not for this model";
}

function oneType(kind, isMany = false) {
  if (kind.enum) return kind.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (kind.type === "boolean") return "true or false";
  const ending = isMany ? "s" : "";
  if (kind.type === "array") {
    const items = kindsOf(kind.items || {}).map((item) => oneType(item, true));
    return `list${ending} of ${count(kind)}${items.join(" or ")}`;
  }
  return ({ string: "text", integer: "integer", number: "number", object: "object" }[kind.type] || "value") + ending + range(kind);
}

const writeNumber = (value) => value.toLocaleString("en-GB");

function count({ minItems: least, maxItems: most }) {
  if (least === undefined) return "";
  return most === undefined ? `${writeNumber(least)} or more ` : `${writeNumber(least)} to ${writeNumber(most)} `;
}

function range({ minimum: least, maximum: most, not: without }) {
  const except = without ? ` but not ${without.const}` : "";
  if (least !== undefined && most !== undefined) return ` from ${writeNumber(least)} to ${writeNumber(most)}${except}`;
  return least === undefined ? except : `, at least ${writeNumber(least)}${except}`;
}

/** All fields of an object and of the objects within it: `[path, schema, isRequired]`. */
function fieldsOf(schema, path = "", depth = 0) {
  const found = resolve(schema);
  const rows = [];
  for (const [name, field] of Object.entries(found.properties || {})) {
    const isRequired = (found.required || []).includes(name);
    rows.push([path + name, field, isRequired]);
    for (const kind of depth < 4 ? kindsOf(field) : []) {
      const [inner, suffix] = kind.type === "array" ? [kindsOf(kind.items || {}), "[]."] : [[kind], "."];
      for (const each of inner) if (each.properties) rows.push(...fieldsOf(each, path + name + suffix, depth + 1));
    }
  }
  return rows;
}

/** A value that fits a schema, for people to see its form. */
function sample(schema) {
  const found = resolve(schema);
  if (found.anyOf) return sample(found.anyOf[0]);
  if (found.enum) return found.enum[0];
  if (found.type === "array") return [sample(found.items || {})];
  if (found.type === "object") {
    const required = Object.entries(found.properties || {}).filter(([name]) => (found.required || []).includes(name));
    return Object.fromEntries(required.map(([name, field]) => [name, sample(field)]));
  }
  return { string: "…", integer: found.minimum || 0, number: 0.5, boolean: true }[found.type] ?? null;
}
