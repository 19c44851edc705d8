// Line charts over time, drawn as SVG.

import { clock, make, showTip } from "./dom.js";

const [WIDTH, HEIGHT] = [460, 190];
const EDGE = { left: 62, right: 10, top: 10, bottom: 22 };
const MOST_POINTS = 400;

function shape(tag, attributes = {}, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// The distance of the lines that a value up to `most` is read by: a round one, so that at most four are needed.
function stepFor(most, base) {
  if (most <= 0) return base === 1024 ? 1024 : 0.25;
  const quarter = most / 4;
  if (base === 1024) return 2 ** Math.max(0, Math.ceil(Math.log2(quarter)));
  const power = 10 ** Math.floor(Math.log10(quarter));
  return power * [1, 2, 2.5, 5, 10].find((step) => step * power >= quarter * (1 - 1e-9));
}

// A chart of `lines`: { name, label, area }, whose values `draw` gets by name. `format` says a value in words.
export class Chart {
  constructor(root, tip, lines, { format, top = null, base = 1024 }) {
    Object.assign(this, { tip, lines, format, top, base });
    const keys = lines.map(({ name, label }) => make("li", {}, make("i", { class: name }), label));
    this.key = make("ul", { class: "key" }, ...keys);
    this.svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
    root.append(this.key, this.svg);
    this.svg.addEventListener("pointermove", (event) => this.hover(event));
    this.svg.addEventListener("pointerleave", () => this.leave());
  }

  // `at` are seconds, `values` lists by the names of the lines; the last `seconds` up to `now` are shown.
  draw(at, values, now, seconds, gap) {
    const from = at.findIndex((moment) => moment >= now - seconds);
    const start = from < 0 ? at.length : from;
    const stride = Math.ceil((at.length - start) / MOST_POINTS) || 1;
    const places = at.map((_, place) => place).filter((place) => place >= start && place % stride === 0);
    if (at.length > start && places.at(-1) !== at.length - 1) places.push(at.length - 1);
    const shown = this.lines.filter(({ name }) => places.some((place) => values[name][place] !== null));
    const most = Math.max(0, ...shown.flatMap(({ name }) => places.map((place) => values[name][place] ?? 0)));
    const step = stepFor(this.top ?? most, this.base);
    const top = this.top ?? Math.max(1, Math.ceil(most / step)) * step;
    const x = (moment) => EDGE.left + (1 - (now - moment) / seconds) * (WIDTH - EDGE.left - EDGE.right);
    const y = (value) => HEIGHT - EDGE.bottom - (value / top) * (HEIGHT - EDGE.top - EDGE.bottom);
    Object.assign(this, { at, values, places, shown, x, y });
    this.svg.replaceChildren(...this.axes(now, seconds, top, step));
    for (const line of shown) this.svg.append(...this.paths(line, gap * stride));
    this.mark = shape("g");
    this.svg.append(this.mark);
    [...this.key.children].forEach((item, place) => (item.hidden = !shown.includes(this.lines[place])));
    this.svg.setAttribute("aria-label", this.words(places.at(-1)));
    if (this.hovered) this.hover(this.hovered);
  }

  axes(now, seconds, top, step) {
    const drawn = [];
    for (let value = 0; value <= top; value += step) {
      const height = this.y(value);
      drawn.push(shape("line", { x1: EDGE.left, x2: WIDTH - EDGE.right, y1: height, y2: height, class: "rule" }));
      drawn.push(shape("text", { x: EDGE.left - 6, y: height + 4, class: "end" }, this.format(value)));
    }
    for (const part of [0, 0.5, 1]) {
      const anchor = part === 0 ? "start" : part === 1 ? "end" : "middle";
      const place = { x: this.x(now - seconds * (1 - part)), y: HEIGHT - 6, class: anchor };
      drawn.push(shape("text", place, clock(now - seconds * (1 - part))));
    }
    return drawn;
  }

  // A line breaks where nothing was told, or no answer came for longer than `gap` seconds.
  paths({ name, area }, gap) {
    const pieces = [];
    let before = null;
    for (const place of this.places) {
      const [moment, value] = [this.at[place], this.values[name][place]];
      if (value === null) before = null;
      else {
        if (before === null || moment - before > gap) pieces.push([]);
        pieces.at(-1).push(`${this.x(moment).toFixed(1)},${this.y(value).toFixed(1)}`);
        before = moment;
      }
    }
    const line = pieces.map((points) => `M${points.join("L")}${points.length === 1 ? "h1" : ""}`).join("");
    const drawn = [shape("path", { d: line, class: `line ${name}` })];
    if (area) {
      const x = (point) => point.split(",")[0];
      const closed = pieces.map((points) => `M${x(points[0])},${this.y(0)}L${points.join("L")}L${x(points.at(-1))},${this.y(0)}Z`);
      drawn.unshift(shape("path", { d: closed.join(""), class: `area ${name}` }));
    }
    return drawn;
  }

  words(place) {
    if (place === undefined) return "no samples yet";
    const told = this.shown.filter(({ name }) => this.values[name][place] !== null);
    return told.map(({ name, label }) => `${label} ${this.format(this.values[name][place])}`).join(", ") || "nothing told";
  }

  hover(event) {
    this.hovered = { clientX: event.clientX, clientY: event.clientY };
    if (!this.places?.length) return;
    const box = this.svg.getBoundingClientRect();
    const wanted = ((event.clientX - box.left) / box.width) * WIDTH;
    const distance = (place) => Math.abs(this.x(this.at[place]) - wanted);
    const place = this.places.reduce((best, each) => (distance(each) < distance(best) ? each : best));
    const line = this.x(this.at[place]);
    this.mark.replaceChildren(shape("line", { x1: line, x2: line, y1: EDGE.top, y2: HEIGHT - EDGE.bottom, class: "cross" }));
    const rows = this.shown.map(({ name, label }) => {
      const value = this.values[name][place];
      return [label, value === null ? "-" : this.format(value)];
    });
    showTip(this.tip, event, [clock(this.at[place]), ...rows]);
  }

  leave() {
    this.hovered = null;
    this.mark?.replaceChildren();
    this.tip.hidden = true;
  }
}
