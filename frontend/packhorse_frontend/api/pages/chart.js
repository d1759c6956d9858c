// A small chart of the last minutes, drawn as SVG: one area, or several lines, on a common scale from 0.

const LEAST_SPAN_MS = 60_000;
const MOST_SPAN_MS = 180_000;
const GAP_MS = 6_000;
const WIDTH = 300;
const HEIGHT = 60;

/** The next round number: 1, 2 or 5 times a power of ten. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((bound) => bound >= value * 0.999);
}

class Chart {
  /** `write` makes a text of a value; `least` is the lowest top of the scale, `most` its highest. */
  constructor(figure, name, { lines = 1, write, least, most = Infinity }) {
    Object.assign(this, { name, write, least, most, points: [], pointer: null });
    this.area = lines === 1 ? make("path", { class: "area" }) : null;
    this.lines = Array.from({ length: lines }, (_, index) => make("path", { class: index ? "line two" : "line" }));
    this.cross = make("line", { class: "cross", y1: 0, y2: HEIGHT, visibility: "hidden" });
    const base = make("line", { class: "base", x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT });
    const size = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" };
    this.svg = make("svg", size, base, this.area, ...this.lines, this.cross);
    this.left = make("span", {}, "\u00a0");
    this.right = make("span", {}, "");
    figure.append(this.svg, make("figcaption", { "aria-hidden": "true" }, this.left, this.right));
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      this.pointer = (event.clientX - box.left) / box.width;
      this.draw();
    });
    this.svg.addEventListener("pointerleave", () => {
      this.pointer = null;
      this.draw();
    });
  }

  /** One more moment. A value may be null: nothing is drawn there. */
  add(at, ...values) {
    this.points.push({ at, values });
    while (this.points[0].at < at - MOST_SPAN_MS) this.points.shift();
    this.draw();
  }

  draw() {
    const end = this.points.length ? this.points[this.points.length - 1].at : 0;
    const span = Math.max(LEAST_SPAN_MS, this.points.length ? end - this.points[0].at : 0);
    const seen = this.points.flatMap((point) => point.values).filter((value) => value !== null);
    const highest = Math.max(0, ...seen);
    const top = Math.min(this.most, highest > this.least ? roundUp(highest) : this.least);
    const x = (at) => (WIDTH * (1 - (end - at) / span)).toFixed(2);
    const y = (value) => (HEIGHT * (1 - Math.min(value, top) / top)).toFixed(2);
    this.lines.forEach((line, index) => {
      const runs = this.runs(index);
      line.setAttribute("d", runs.map((run) => `M${run.map((point) => `${x(point.at)} ${y(point.values[index])}`).join("L")}`).join(""));
      if (!this.area) return;
      const closed = (run) => `M${x(run[0].at)} ${HEIGHT}L${run.map((point) => `${x(point.at)} ${y(point.values[0])}`).join("L")}L${x(run[run.length - 1].at)} ${HEIGHT}Z`;
      this.area.setAttribute("d", runs.map(closed).join(""));
    });
    this.describe(top, highest, seen.length > 0, x, end - span * (1 - this.pointer));
  }

  /** The points of a line, parted where something is missing. */
  runs(index) {
    const runs = [];
    let last = null;
    for (const point of this.points) {
      if (point.values[index] !== null) {
        if (last === null || point.at - last > GAP_MS) runs.push([]);
        runs[runs.length - 1].push(point);
        last = point.at;
      } else {
        last = null;
      }
    }
    return runs;
  }

  describe(top, highest, isSeen, x, at) {
    const near = this.pointer === null ? null : this.points.reduce((best, point) =>
      (best === null || Math.abs(point.at - at) < Math.abs(best.at - at) ? point : best), null);
    this.cross.setAttribute("visibility", near === null ? "hidden" : "visible");
    const write = (value) => (value === null ? "–" : this.write(value));
    if (near !== null) {
      this.cross.setAttribute("x1", x(near.at));
      this.cross.setAttribute("x2", x(near.at));
      say(this.left, near.values.map(write).join(" · "));
      say(this.right, new Date(near.at).toLocaleTimeString());
      return;
    }
    say(this.left, isSeen ? `to ${this.write(top)}` : "nothing yet");
    say(this.right, isSeen ? `max ${this.write(highest)}` : "");
    const now = this.points.length ? this.points[this.points.length - 1].values.map(write).join(" and ") : "–";
    this.svg.setAttribute("aria-label", `${this.name}, last minutes: now ${now}, highest ${write(isSeen ? highest : null)}`);
  }
}
