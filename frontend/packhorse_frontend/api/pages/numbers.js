// The text of /metrics as numbers, what grew between two looks at it, and numbers as people read them.

const SERIES = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** One scrape: each series with its name, its labels and its value. */
function readMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : SERIES.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] || "").matchAll(LABEL)) labels[name] = value;
    found.set(`${match[1]}{${match[2] || ""}}`, { name: match[1], labels, value: Number(match[3]) });
  }
  return found;
}

/** What grew from `then` to `now`. A counter that went back has begun anew. */
function growth(now, then) {
  const grown = [];
  for (const [key, series] of now) {
    const before = then.has(key) ? then.get(key).value : 0;
    const value = series.value < before ? series.value : series.value - before;
    grown.push({ ...series, value });
  }
  return grown;
}

/** The sum of all series of a name, over all their labels. */
function total(series, name) {
  return series.reduce((sum, each) => (each.name === name ? sum + each.value : sum), 0);
}

/** Sums by the value of a label. */
function totalsBy(series, name, label) {
  const sums = new Map();
  for (const each of series) {
    if (each.name === name) sums.set(each.labels[label], (sums.get(each.labels[label]) || 0) + each.value);
  }
  return sums;
}

/** The mean of what a histogram took in; null for nothing. */
function mean(series, name) {
  const count = total(series, `${name}_count`);
  return count > 0 ? total(series, `${name}_sum`) / count : null;
}

/** The value that a share `q` of a histogram's observations stays within: `{value, isBeyond}`, null for no observation. */
function quantile(series, name, q) {
  const sums = [...totalsBy(series, `${name}_bucket`, "le")];
  const buckets = sums.map(([bound, count]) => [bound === "+Inf" ? Infinity : Number(bound), count]).sort((a, b) => a[0] - b[0]);
  const count = buckets.length ? buckets[buckets.length - 1][1] : 0;
  if (!(count > 0)) return null;
  const rank = q * count;
  let [lower, below] = [0, 0];
  for (const [bound, upTo] of buckets) {
    if (upTo >= rank && upTo > below) {
      if (bound === Infinity) return { value: lower, isBeyond: true };
      return { value: lower + (bound - lower) * ((rank - below) / (upTo - below)), isBeyond: false };
    }
    [lower, below] = [bound, upTo];
  }
  return null;
}

const GROUPED = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });

function writeCount(value) {
  return value < 1e5 ? GROUPED.format(value) : SHORT.format(value);
}

function writeRate(value) {
  return value > 0 && value < 9.95 ? value.toFixed(1) : writeCount(value);
}

function writeShare(value) {
  return `${Math.round(100 * value)}\u202f%`;
}

function writeSeconds(seconds) {
  if (seconds < 0.00995) return `${(1000 * seconds).toFixed(1)}\u202fms`;
  if (seconds < 0.9995) return `${Math.round(1000 * seconds)}\u202fms`;
  return `${seconds < 9.95 ? seconds.toFixed(1) : Math.round(seconds)}\u202fs`;
}

function writeQuantile(found) {
  if (found === null) return "–";
  return (found.isBeyond ? "over " : "") + writeSeconds(found.value);
}

function writeBytes(bytes) {
  if (!bytes) return "–";
  const [size, unit] = bytes < 2 ** 30 ? [bytes / 2 ** 20, "MiB"] : [bytes / 2 ** 30, "GiB"];
  return `${size < 9.95 ? size.toFixed(1) : Math.round(size)}\u202f${unit}`;
}
