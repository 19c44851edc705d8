// Elements and figures for people. Text is only ever set as text, so nothing a server says can become markup.

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Replaces what is in `parent` only when `key` changed, so that hovering and selecting survive a look.
export function fill(parent, children, key) {
  if (key !== undefined && parent.dataset.shown === key) return;
  if (key !== undefined) parent.dataset.shown = key;
  parent.replaceChildren(...children);
}

export function count(value) {
  return value.toLocaleString("en");
}

export function several(value, word) {
  return `${count(value)} ${word}${value === 1 ? "" : "s"}`;
}

export function bytes(value) {
  let unit = 0;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  while (value >= 1024 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
  const digits = unit === 0 || value >= 100 || Number.isInteger(value) ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[unit]}`;
}

export function percent(part) {
  return `${(100 * part).toFixed(part < 0.9995 && part > 0 ? 1 : 0)}%`;
}

export function duration(seconds) {
  const whole = Math.round(seconds);
  if (whole < 90) return `${whole} s`;
  return whole < 5400 ? `${Math.round(whole / 60)} min` : `${(whole / 3600).toFixed(1)} h`;
}

export function clock(epochSeconds) {
  return new Date(1000 * epochSeconds).toLocaleTimeString("en-GB");
}

// A small box beside the pointer. `lines` are texts, or pairs of a label and a text.
export function showTip(tip, event, lines) {
  tip.replaceChildren(
    ...lines.map((line) =>
      Array.isArray(line) ? make("div", {}, make("span", {}, line[0]), make("b", {}, line[1])) : make("p", {}, line),
    ),
  );
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const [right, below] = [event.clientX + 14, event.clientY + 14];
  tip.style.left = `${Math.max(4, right + box.width > innerWidth ? event.clientX - box.width - 10 : right)}px`;
  tip.style.top = `${Math.max(4, below + box.height > innerHeight ? event.clientY - box.height - 10 : below)}px`;
}
