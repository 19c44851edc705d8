// Asks the local server every second for what it knows, and shows it.

import { Chart } from "./charts.js";
import { bytes, clock, count, duration, fill, make, percent, several } from "./dom.js";
import { hitRates, perSecond, seriesOf, total } from "./figures.js";
import { cellsOf, FrameGrid, KINDS } from "./frames.js";

const MOST_SAMPLES = 3600;
const LEAST_SECONDS = 20; // so that the first seconds of a watch fill a chart, but do not race through it
const SPANS = { "2 min": 120, "10 min": 600, "1 h": 3600 };
const at = (id) => document.getElementById(id);
const tip = at("tip");

const charts = {
  memory: new Chart(
    at("memory-chart"),
    tip,
    [
      { name: "resident_bytes", label: "resident", area: true },
      { name: "committed_bytes", label: "committed" },
      { name: "held_bytes", label: "held" },
      { name: "floor_bytes", label: "packed floor" },
    ],
    { format: bytes },
  ),
  reclaim: new Chart(
    at("reclaim-chart"),
    tip,
    [
      { name: "reclaimed", label: "reclaimed by evictions", area: true },
      { name: "returned", label: "returned to the system" },
    ],
    { format: bytes },
  ),
  hits: new Chart(at("hit-chart"), tip, [{ name: "rate", label: "hit rate", area: true }], {
    format: percent,
    top: 1,
    base: 10,
  }),
};

const view = { rank: null, seconds: 120, picture: null, samples: [], grids: [] };

async function look() {
  const asked = view.samples.at(-1)?.[0] ?? 0;
  try {
    const answer = await fetch(`/state?after=${asked}`, { signal: AbortSignal.timeout(5000) });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    take(await answer.json());
    show();
  } catch (error) {
    lost("radix-pages watch does not answer: has it ended? This page goes on when it is started again.", error);
  }
  setTimeout(look, 1000 * Math.min(view.picture?.interval ?? 1, 1));
}

// A watch that was started anew numbers its samples anew.
function take(picture) {
  if (view.picture && view.picture.began !== picture.began) view.samples = [];
  view.samples = [...view.samples, ...picture.samples.filter(([number]) => number > (view.samples.at(-1)?.[0] ?? 0))];
  view.samples.splice(0, view.samples.length - MOST_SAMPLES);
  view.picture = picture;
}

function lost(text, error) {
  console.warn(error);
  banner(text);
  at("pulse").textContent = "not connected";
}

function banner(text) {
  at("banner").hidden = !text;
  if (at("banner").textContent !== text) at("banner").textContent = text;
  at("main").classList.toggle("old", Boolean(text));
}

function show() {
  const { picture } = view;
  const ranks = picture.ranks;
  if (view.rank !== null && view.rank >= ranks.length) view.rank = null;
  at("server").textContent = picture.server;
  showAnswer(picture);
  if (!ranks.length) return;
  const chosen = view.rank === null ? ranks : [ranks[view.rank]];
  showTabs(ranks.length);
  showWarnings(ranks);
  const modes = [...new Set(chosen.map((state) => state.mode))].join(", ");
  at("modes").textContent = `mode ${modes}`;
  const series = seriesOf(view.samples, picture.series, view.rank);
  showTiles(chosen, series);
  showFrames(ranks);
  showCharts(series, picture);
  showPrefixes(ranks);
}

// Whether the server answers, and since when it does not.
function showAnswer({ trouble, now, asked, interval }) {
  const last = view.samples.at(-1)?.[1];
  const ago = last === undefined ? null : now - last;
  const late = asked !== null && now - asked > Math.max(3, 2 * interval);
  if (trouble) banner(`No answer since ${clock(trouble.since)} (${duration(now - trouble.since)}): ${trouble.text}; trying again.`);
  else if (late) banner(`The server has been busy with our question since ${clock(asked)} (${duration(now - asked)}).`);
  else banner("");
  at("pulse").textContent = trouble || late || ago === null ? "waiting" : `live, ${clock(last)}`;
  at("pulse").classList.toggle("live", !trouble && !late && ago !== null);
}

function choice(parent, entries, chosen, pick) {
  const buttons = entries.map(([label, value]) => {
    const button = make("button", { type: "button", "aria-pressed": String(value === chosen) }, label);
    button.addEventListener("click", () => {
      pick(value);
      show();
    });
    return button;
  });
  fill(parent, buttons, JSON.stringify([entries, chosen]));
}

function showTabs(ranks) {
  at("tabs").hidden = ranks < 2;
  const entries = [["all ranks", null], ...Array.from({ length: ranks }, (_, rank) => [`rank ${rank}`, rank])];
  choice(at("tabs"), entries, view.rank, (rank) => (view.rank = rank));
}

function showWarnings(ranks) {
  const found = ranks.flatMap((state, rank) => {
    const where = ranks.length > 1 ? `Rank ${rank}: ` : "";
    const memory = state.memory ?? {};
    const counted = [
      [memory.commit_failures, "time", "the system refused memory"],
      [memory.ceiling_refusals, "time", "the ceiling kept frames from being committed"],
      [memory.over_ceiling_frames, "frame", "over the ceiling, held by something"],
    ];
    const said = counted.filter(([number]) => number).map(([number, unit, text]) => `${several(number, unit)} ${text}.`);
    if (state.ledger_error) said.unshift(state.ledger_error);
    if (state.degraded) said.unshift(`Only observes until it is started again: ${state.degraded}`);
    return said.map((text) => where + text);
  });
  at("warnings").hidden = !found.length;
  fill(at("warnings"), found.map((text) => make("li", {}, text)), JSON.stringify(found));
}

function showTiles(states, series) {
  const sum = (read) => total(states, read);
  const memory = (name) => sum((state) => state.memory?.[name]);
  const size = (value) => (value === null ? "-" : bytes(value));
  const all = (value) => (value === null ? "-" : count(value));
  const heldBytes = sum((state) => (state.held_pages === undefined ? null : state.held_pages * state.page_bytes));
  const poolBytes = memory("total_bytes") ?? sum(poolOf);
  const rate = hitRates(series).at(-1) ?? null;
  const [hit, computed] = [sum((state) => state.hit_tokens) ?? 0, sum((state) => state.computed_tokens) ?? 0];
  const speed = perSecond(series.at, series.reclaimed_bytes);
  const resident = memory("resident_bytes");
  const tiles = [
    resident === null
      ? ["Held memory", size(heldBytes), `of ${size(poolBytes)}; no backing: nothing is returned`, [heldBytes, poolBytes]]
      : ["Resident memory", size(resident), `of ${size(poolBytes)}; ${size(heldBytes)} held`, [resident, poolBytes]],
    ["Returned now", size(memory("returned_bytes")), returnedInAll(memory)],
    ["Hit rate", rate === null ? "-" : percent(rate), hitsInAll(hit, computed)],
    ["Cached", all(sum((state) => state.cached_tokens)), `tokens free to evict; ${all(sum((state) => state.protected_tokens))} more in use`],
    ["Held frames", all(sum((state) => state.held_frames)), `packed floor ${all(sum((state) => state.packed_floor))}, of ${all(sum(framesOf))}`],
    ["Stranded", all(sum((state) => state.stranded_pages)), `free pages in held frames, ${size(sum((state) => state.stranded_pages * state.page_bytes))}`],
    ["Reclaimed", size(sum((state) => state.pages_reclaimed * state.page_bytes)), `by ${all(sum((state) => state.evictions))} evictions${speed ? `; ${bytes(speed)}/s now` : ""}`],
    ["Requests", all(sum((state) => state.running_requests)), `running, ${all(sum((state) => state.waiting_requests))} waiting`],
  ];
  fill(at("tiles"), tiles.map(tile), JSON.stringify(tiles));
}

function tile([label, value, detail, parts]) {
  const made = make("div", { class: "tile" }, make("h3", {}, label), make("strong", {}, value), make("span", {}, detail));
  if (parts && parts[1]) made.append(make("progress", { value: parts[0] ?? 0, max: parts[1], "aria-label": label }));
  return made;
}

function returnedInAll(memory) {
  if (memory("returned_bytes_total") === null) return "this server returns nothing";
  return `${bytes(memory("returned_bytes_total"))} in all, by ${several(memory("trims"), "trim")}`;
}

function hitsInAll(hit, computed) {
  if (hit + computed === 0) return "no prompt yet";
  return `last 30 s; ${percent(hit / (hit + computed))} of ${count(hit + computed)} prompt tokens since start`;
}

function framesOf(state) {
  return state.held_frames === undefined ? null : state.held_frames + state.empty_frames;
}

function poolOf(state) {
  if (state.held_pages === undefined) return null;
  return (state.held_pages + state.stranded_pages + state.empty_pages) * state.page_bytes;
}

function showFrames(ranks) {
  const shown = ranks.map((_, rank) => rank).filter((rank) => view.rank === null || view.rank === rank);
  while (view.grids.length < ranks.length) view.grids.push(new FrameGrid(tip));
  fill(at("grids"), shown.map((rank) => view.grids[rank].root), JSON.stringify(shown));
  for (const rank of shown) view.grids[rank].draw(ranks[rank], ranks.length > 1 ? `rank ${rank}` : "");
  const states = shown.map((rank) => ranks[rank]);
  const cells = states.flatMap(cellsOf);
  const frames = (kind) => cells.filter((cell) => cell.kind === kind).reduce((sum, cell) => sum + cell.last - cell.first + 1, 0);
  const stranded = total(states, (state) => state.stranded_pages);
  const entries = Object.entries(KINDS).map(([kind, text]) => [kind, `${text}: ${several(frames(kind), "frame")}`]);
  if (stranded !== null) entries.push(["stranded", `stranded, free in a held frame: ${several(stranded, "page")}`]);
  const items = entries.map(([kind, text]) => make("li", {}, make("i", { class: `${kind} sample` }), text));
  fill(at("legend"), items, JSON.stringify(entries));
}

function showCharts(series, { now, interval }) {
  choice(at("spans"), Object.entries(SPANS), view.seconds, (seconds) => (view.seconds = seconds));
  const gap = 3 * interval + 1;
  const seconds = Math.min(view.seconds, Math.max(now - (series.at[0] ?? now), LEAST_SECONDS));
  const draw = (chart, values) => chart.draw(series.at, values, now, seconds, gap);
  draw(charts.memory, series);
  draw(charts.reclaim, { reclaimed: series.reclaimed_bytes, returned: series.returned_bytes_total });
  draw(charts.hits, { rate: hitRates(series) });
}

function showPrefixes(ranks) {
  const several = ranks.length > 1;
  const found = ranks.flatMap((state, rank) => (state.shared_prefixes?.largest ?? []).map((prefix) => ({ ...prefix, rank })));
  const shown = found.filter(({ rank }) => view.rank === null || rank === view.rank);
  shown.sort((a, b) => b.spared_tokens - a.spared_tokens);
  at("prefixes-floor").hidden = ranks.every((state) => state.shared_prefixes?.is_complete ?? true);
  const columns = {
    tokens: "Tokens",
    own_tokens: "of these its own",
    leaves: "Cached sequences",
    children: "Ways on",
    spared_tokens: "Tokens spared",
    locks: "Running",
    hits: "Requests so far",
    ...(several && view.rank === null ? { rank: "Rank" } : {}),
  };
  const head = make("thead", {}, make("tr", {}, ...Object.entries(columns).map(([name, text]) => make("th", { scope: "col", title: MEANING[name] }, text))));
  const rows = shown.slice(0, 10).map((prefix) =>
    make("tr", {}, ...Object.keys(columns).map((name) => make("td", {}, name === "rank" ? String(prefix.rank) : count(prefix[name])))),
  );
  if (!rows.length) rows.push(make("tr", {}, make("td", { colspan: Object.keys(columns).length, class: "none" }, "No two cached sequences share a prefix.")));
  fill(at("prefixes"), [head, make("tbody", {}, ...rows)], JSON.stringify([columns, shown]));
}

const MEANING = {
  tokens: "Length of the prefix, from the beginning of the sequence",
  own_tokens: "Tokens after the next shorter shared prefix",
  leaves: "Cached sequences that begin with this prefix",
  children: "Different continuations right after it",
  spared_tokens: "Tokens that would be cached besides, if every sequence kept its own copy",
  locks: "Running requests that use it now",
  hits: "Requests that used it since it was cached",
  rank: "Data-parallel rank",
};

look();
