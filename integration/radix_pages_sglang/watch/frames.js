// The frames of a rank: one square each, filled from below with the pages that somebody holds.

import { bytes, count, make, several, showTip } from "./dom.js";

export const KINDS = {
  requests: "held by running requests",
  cache: "held by the cache alone",
  empty: "empty, has memory",
  returned: "returned to the system",
};

// "0*3 16" -> [0, 0, 0, 16]
export function unpacked(runs) {
  return runs.split(" ").flatMap((run) => {
    const [value, times = 1] = run.split("*").map(Number);
    return Array(times).fill(value);
  });
}

// The squares of a rank's map. `free` pages are stranded in a held frame; page 0 is SGLang's and nobody's.
export function cellsOf(state) {
  const holders = state.frame_holders;
  if (!holders) return [];
  const [requests, cache, returned] = ["requests", "cache", "returned"].map((name) => unpacked(holders[name]));
  const frames = state.held_frames + state.empty_frames;
  const perCell = holders.frames_per_cell;
  const allPages = state.held_pages + state.stranded_pages + state.empty_pages + 1;
  return requests.map((used, place) => {
    const first = place * perCell;
    const last = Math.min(first + perCell, frames) - 1;
    const start = first * state.pages_per_frame;
    const pages = Math.min((last + 1) * state.pages_per_frame, allPages) - start - (place ? 0 : 1);
    const cell = { first, last, pages, requests: used, cache: cache[place], returned: returned[place] };
    return { ...cell, free: pages - used - cell.cache, kind: kindOf(cell) };
  });
}

function kindOf({ first, last, requests, cache, returned }) {
  if (returned === last - first + 1) return "returned";
  if (requests) return "requests";
  if (cache) return "cache";
  return first === 0 && last === 0 ? "padding" : "empty";
}

function described(cell, state) {
  const number = last(cell) ? `frames ${count(cell.first)} to ${count(cell.last)}` : `frame ${count(cell.first)}`;
  const frameBytes = state.page_bytes * state.pages_per_frame;
  const size = bytes(frameBytes * (cell.last - cell.first + 1));
  const held = cell.requests || cell.cache || cell.kind === "padding";
  const lines = [`${number}, ${size}`];
  if (cell.kind === "returned") lines.push(KINDS.returned);
  else if (!held) lines.push(KINDS.empty);
  if (held) {
    const say = (pages) => `${several(pages, "page")}, ${bytes(pages * state.page_bytes)}`;
    lines.push(["running requests", say(cell.requests)], ["cache alone", say(cell.cache)]);
    lines.push([last(cell) ? "free" : "stranded", say(cell.free)]);
  }
  if (last(cell) && cell.returned && cell.kind !== "returned") lines.push(["returned", several(cell.returned, "frame")]);
  if (cell.first === 0) lines.push("holds SGLang's padding page: never returned");
  return lines;
}

const last = (cell) => cell.last > cell.first;

// The map of one rank. `draw` changes only the squares that changed.
export class FrameGrid {
  constructor(tip) {
    this.title = make("h3");
    this.grid = make("div", { class: "grid", role: "img" });
    this.note = make("p", { class: "note" });
    this.root = make("div", { class: "rank" }, this.title, this.grid, this.note);
    this.drawn = [];
    this.hovered = null;
    this.tip = tip;
    this.grid.addEventListener("pointermove", (event) => this.hover(event));
    this.grid.addEventListener("pointerleave", () => this.leave());
  }

  draw(state, title) {
    this.state = state;
    this.cells = cellsOf(state);
    this.title.textContent = title;
    this.title.hidden = !title;
    this.resize(this.cells.length);
    this.cells.forEach((cell, place) => this.paint(cell, place));
    this.grid.setAttribute("aria-label", this.summary());
    this.note.textContent = this.cells.length ? this.scale() : (state.ledger_error ?? "This server tells no frame map.");
    if (this.hovered) this.hover(this.hovered);
  }

  resize(length) {
    const squares = this.grid.children;
    while (squares.length > length) this.grid.lastChild.remove();
    while (squares.length < length) this.grid.append(make("i"));
    this.drawn.length = length;
    const size = [[100, 30], [300, 22], [800, 15], [2500, 11]].find(([most]) => length <= most)?.[1] ?? 8;
    this.grid.style.setProperty("--square", `${size}px`);
    this.grid.classList.toggle("dense", size < 12);
  }

  paint(cell, place) {
    const key = `${cell.kind} ${cell.requests} ${cell.cache} ${cell.pages}`;
    if (this.drawn[place] === key) return;
    this.drawn[place] = key;
    const square = this.grid.children[place];
    square.className = cell.kind;
    const share = (pages) => `${cell.pages ? (100 * pages) / cell.pages : 0}%`;
    square.style.setProperty("--requests", share(cell.requests));
    square.style.setProperty("--held", share(cell.requests + cell.cache));
  }

  summary() {
    const kinds = Object.keys(KINDS).map((kind) => `${this.cells.filter((cell) => cell.kind === kind).length} ${kind}`);
    return `${several(this.cells.length, "square")}: ${kinds.join(", ")}`;
  }

  scale() {
    const { pages_per_frame: pages, page_size: tokens, page_bytes: size, frame_holders: holders } = this.state;
    const squares = holders.frames_per_cell > 1 ? `A square is ${count(holders.frames_per_cell)} frames. ` : "";
    const frame = `${several(pages, "page")} of ${several(tokens, "token")}, ${bytes(pages * size)}`;
    return `${squares}${several(this.state.held_frames + this.state.empty_frames, "frame")} of ${frame} each.`;
  }

  hover(event) {
    this.hovered = { clientX: event.clientX, clientY: event.clientY, target: event.target };
    const place = [...this.grid.children].indexOf(event.target);
    if (place < 0 || !this.cells[place]) this.tip.hidden = true;
    else showTip(this.tip, event, described(this.cells[place], this.state));
  }

  leave() {
    this.hovered = null;
    this.tip.hidden = true;
  }
}
