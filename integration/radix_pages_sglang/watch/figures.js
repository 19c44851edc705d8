// Numbers of one or several ranks taken together, from their states and from the samples over time.

export const HIT_WINDOW_SECONDS = 30;

export function total(states, read) {
  const values = states.map(read).filter((value) => value !== null && value !== undefined);
  return values.length ? values.reduce((sum, value) => sum + value, 0) : null;
}

// What only grows: these series begin with 0.
const COUNTS = new Set(["reclaimed_bytes", "returned_bytes_total", "hit_tokens", "computed_tokens"]);

// The samples as one series per name, the ranks of `chosen` (or all) added up; null where no rank tells it.
export function seriesOf(samples, names, chosen) {
  const most = Math.max(0, ...samples.map(([, , ranks]) => ranks.length));
  const ranks = chosen === null ? [...Array(most).keys()] : [chosen];
  const series = { at: samples.map(([, at]) => at) };
  names.forEach((name, column) => {
    const told = ranks.map((rank) => samples.map(([, , all]) => all[rank]?.[column] ?? null));
    const each = COUNTS.has(name) ? told.map(grown) : told;
    series[name] = samples.map((_, place) => total(each, (values) => values[place]));
  });
  return series;
}

// A count that only grows, from 0 at the first sample: a server that starts anew begins again and takes nothing away.
function grown(counts) {
  let before = null;
  let sum = 0;
  return counts.map((value) => {
    if (value === null) return before === null ? null : sum;
    if (before !== null) sum += value >= before ? value - before : value;
    before = value;
    return sum;
  });
}

// The part of prompt tokens that were found cached in the seconds before each sample; null where none were prefilled.
export function hitRates({ at, hit_tokens: hits, computed_tokens: computed }, seconds = HIT_WINDOW_SECONDS) {
  let first = 0;
  return at.map((now, place) => {
    while (at[first] < now - seconds) first += 1;
    const hit = hits[place] - hits[first];
    const all = hit + computed[place] - computed[first];
    return all > 0 ? hit / all : null;
  });
}

// By how much `counts` grew in one second, over the last `seconds`; null with fewer than two samples.
export function perSecond(at, counts, seconds = 10) {
  const end = at.length - 1;
  const first = at.findIndex((moment) => moment >= at[end] - seconds);
  if (end < 1 || first >= end) return null;
  return (counts[end] - counts[first]) / (at[end] - at[first]);
}
