// Line charts over time, on uPlot: themes, sizes, gaps. Knows columns of samples and nothing of where they come from.

import { bytes, el, rate, say } from "./format.js";

const all = new Set();

/** Seconds that charts can show; the daemon has samples of 24 hours, the older the coarser. */
export const RANGES = [[60, "1 min"], [600, "10 min"], [7200, "2 h"], [86400, "24 h"]];
/** A value is above the scale if it is so many times the value below which this share of the samples lies. */
const OUTLIER = { times: 3, share: 0.98 };

/** Steps of a scale of bytes: powers of two, so that its marks are whole units. */
const BINARY = Array.from({ length: 60 }, (_, n) => 2 ** n);
const HEIGHT = 180;

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Every chart again, with the colours that hold now. */
export function redrawAll() {
  for (const chart of all) chart.build();
}

/** Samples between two gaps would not be seen as lines: points are drawn for them. */
function lonely(plot, series) {
  const values = plot.data[series];
  const [first, last] = plot.series[series].idxs ?? [0, values.length - 1];
  const points = [];
  for (let i = first; i <= last; i++) {
    if (values[i] != null && values[i - 1] == null && values[i + 1] == null) points.push(i);
  }
  return points;
}

/**
 * One chart. `series`: `{label, colour, value(samples, i) or column, fill, dash}`; `show` makes text of a value; `log` for a
 * logarithmic scale; `top` is the least upper end of the scale. With `clip`, rare peaks leave the scale instead of flattening
 * everything else; the chart says how high they are, and a button shows them.
 */
export class Chart {
  constructor(title, { series, show, log = false, top = 1, note = "", max = null, clip = false }) {
    Object.assign(this, { series, show, log, top, max, clip, binary: [bytes, rate].includes(show) });
    this.peaks = el("button", { type: "button", class: "link small", hidden: true, onclick: () => this.showPeaks() });
    this.place = el("div", { class: "chart" });
    this.nothing = el("div", { class: "empty" }, "no samples yet");
    this.element = el("section", { class: "card", "aria-label": title },
      el("header", {}, el("h2", {}, title), el("span", { class: "quiet small" }, note), this.peaks), this.place);
    this.data = [[], ...series.map(() => [])];
    this.watch = new ResizeObserver(() => this.resize());
    this.watch.observe(this.place);
    all.add(this);
    this.build();
  }

  build() {
    const grid = { stroke: colour("line-soft"), width: 1 };
    const axis = { stroke: colour("soft"), grid, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const show = (value) => (value == null ? "–" : this.show(value));
    const lines = this.series.map((s) => ({
      label: s.label,
      stroke: colour(s.colour),
      width: s.width ?? 1.6,
      dash: s.dash,
      fill: s.fill ? `${colour(s.colour)}2e` : undefined,
      value: (_, value) => show(value),
      points: { show: true, size: 4, filter: lonely },
    }));
    this.plot?.destroy();
    this.plot = new uPlot({
      width: this.width(),
      height: HEIGHT,
      pxAlign: 1,
      cursor: { y: false, points: { size: 7 }, sync: { key: "time" } },
      hooks: { setLegend: [(plot) => this.showMoment(plot)] },
      legend: { live: true, markers: { width: 0, fill: (_, n) => colour(this.series[n - 1].colour) } },
      scales: {
        x: { time: true, range: () => this.range() },
        y: { distr: this.log ? 3 : 1, range: (_, low, high) => this.span(low, high) },
      },
      axes: [
        { ...axis, space: 70, size: 28, values: [
          [60, "{HH}:{mm}", null, null, null, null, null, null, 1],
          [1, "{HH}:{mm}:{ss}", null, null, null, null, null, null, 1],
        ] },
        { ...axis, size: 66, grid: { ...grid, filter: (_, splits) => (this.log ? splits.map((v) => (Number.isInteger(Math.log10(v)) ? v : null)) : splits) }, ...(this.binary ? { incrs: BINARY } : {}), values: (_, ticks) => ticks.map((t) => (t == null ? "" : show(t))) },
      ],
      series: [{ label: "Time", value: "{HH}:{mm}:{ss}" }, ...lines],
    }, this.data, this.place);
    this.place.append(this.nothing);
  }

  width() {
    return Math.max(200, Math.floor(this.place.clientWidth));
  }

  resize() {
    if (this.plot && this.place.clientWidth && this.plot.width !== this.width()) {
      this.plot.setSize({ width: this.width(), height: HEIGHT });
    }
  }

  range() {
    return this.between ?? [0, 1];
  }

  span(low, high) {
    if (this.log) {
      if (low == null || high == null) return [1, 1000];
      return [10 ** Math.floor(Math.log10(Math.max(low, 1))), 10 ** Math.ceil(Math.log10(Math.max(high * 1.05, 10)))];
    }
    const least = Math.min(0, low ?? 0);
    const most = this.max ?? Math.max(this.top, (this.limit ?? high ?? 0) * 1.08);
    return [least * 1.08, most];
  }

  /** Where the scale ends below rare peaks: nothing if there are none, or if they are to be shown. */
  limitOf(columns, from) {
    if (!this.clip) return null;
    const values = columns.flatMap((c) => c.slice(from)).filter((v) => v > 0).sort((a, b) => a - b);
    const usual = values[Math.floor(values.length * OUTLIER.share)];
    const peak = values.at(-1);
    const rare = usual > 0 && values.length > 50 && peak > OUTLIER.times * Math.max(usual, this.top);
    this.peaks.hidden = !rare;
    if (!rare) return null;
    say(this.peaks, this.whole ? "cut peaks off" : `peaks to ${this.show(peak)} cut off: show`);
    return this.whole ? null : Math.max(usual * 1.5, this.top);
  }

  /** Says of which moment the values of the legend are. */
  showMoment(plot) {
    const index = plot.legend.idxs?.[0];
    const last = plot.data[0].length - 1;
    // The pointer has left: the latest values again.
    if (index == null && last >= 0 && !(plot.cursor.left >= 0)) queueMicrotask(() => all.has(this) && plot === this.plot && plot.setLegend({ idx: last }, false));
    if (index != null && this.onmoment) this.onmoment(plot.data[0][index], !(plot.cursor.left >= 0));
  }

  showPeaks() {
    this.whole = !this.whole;
    if (this.drawnWith) this.draw(...this.drawnWith);
  }

  /** Draws samples: an object of columns, of which `time_ms` is one, from `begin` to `end` in seconds since 1970. */
  draw(samples, begin, end) {
    this.drawnWith = [samples, begin, end];
    const times = samples.time_ms ?? [];
    this.between = [begin, end];
    // Steps with nothing measured in between are gaps, not lines across. An idle volume is measured every three seconds.
    const xs = [];
    const columns = this.series.map(() => []);
    let from = 0;
    for (let i = 0; i < times.length; i++) {
      if (i > 0 && times[i] - times[i - 1] > 1.5 * (samples.step_ms?.[i] ?? 1000) + 3000) {
        xs.push((times[i - 1] + times[i]) / 2000);
        columns.forEach((c) => c.push(null));
      }
      if (times[i] / 1000 < begin) from = xs.length + 1;
      xs.push(times[i] / 1000);
      this.series.forEach((s, n) => columns[n].push((s.value ? s.value(samples, i) : samples[s.column]?.[i]) ?? null));
    }
    this.limit = this.limitOf(columns, from);
    this.data = [xs, ...columns];
    this.nothing.hidden = columns.some((c) => c.slice(from).some((v) => v != null));
    this.plot.setData(this.data);
    // Where the pointer is in no chart, the legend has the latest values.
    if (!(this.plot.cursor.left >= 0) && xs.length) this.plot.setLegend({ idx: xs.length - 1 }, false);
  }

  /** How many values are drawn; for those who want to know whether anything is. */
  get drawn() {
    return this.data.slice(1).reduce((n, c) => n + c.filter((v) => v != null).length, 0);
  }

  end() {
    all.delete(this);
    this.watch.disconnect();
    this.plot.destroy();
  }
}

/** Columns of samples of 24 hours. The daemon makes old ones coarser, so they are asked for anew from time to time. */
export class Samples {
  constructor() {
    this.columns = {};
  }

  /** From which time on samples are asked for. */
  get since() {
    return (this.columns.time_ms?.length ?? 0) > this.first + 900 ? 0 : this.columns.time_ms?.at(-1) ?? 0;
  }

  /** Takes the answer to a question for the samples after `since`. */
  add(columns, since) {
    if (since === 0) {
      this.columns = columns;
      this.first = columns.time_ms?.length ?? 0;
      return;
    }
    if (!columns.time_ms?.length) return;
    const had = this.columns.time_ms.length;
    for (const [name, values] of Object.entries(columns)) {
      this.columns[name] = (this.columns[name] ?? new Array(had).fill(null)).concat(values);
    }
  }

  /** The mean of a column over the last seconds. */
  recent(name, seconds = 5) {
    const { time_ms: times = [], [name]: values = [] } = this.columns;
    const some = values.filter((v, i) => v != null && times[i] > times.at(-1) - seconds * 1000);
    return some.length ? some.reduce((a, b) => a + b, 0) / some.length : null;
  }
}

/** Hits per hundred reads over ten seconds up to sample `i`, so that single seconds do not make it jump. */
export function hitRatio(samples, i, over_ms = 10_000) {
  let hits = 0;
  let all = 0;
  for (let k = i; k >= 0 && (k === i || samples.time_ms[k] > samples.time_ms[i] - over_ms); k--) {
    hits += samples.hits?.[k] ?? 0;
    all += (samples.hits?.[k] ?? 0) + (samples.misses?.[k] ?? 0);
  }
  return all > 0 ? (100 * hits) / all : null;
}
