// Line charts over time, on uPlot: themes, sizes, gaps. Knows columns of samples and nothing of where they come from.

import { bytes, el } from "./format.js";

const all = new Set();

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
 * logarithmic scale; `top` is the least upper end of the scale.
 */
export class Chart {
  constructor(title, { series, show, log = false, top = 1, note = "", max = null }) {
    Object.assign(this, { series, show, log, top, max, binary: show === bytes });
    this.place = el("div", { class: "chart" });
    this.nothing = el("div", { class: "empty" }, "no samples yet");
    this.element = el("section", { class: "card", "aria-label": title },
      el("header", {}, el("h2", {}, title), el("span", { class: "quiet small" }, note)), this.place);
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
        { ...axis, size: 66, ...(this.binary ? { incrs: BINARY } : {}), values: (_, ticks) => ticks.map((t) => (t == null ? "" : show(t))) },
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
    const most = this.max ?? Math.max(this.top, (high ?? 0) * 1.08);
    return [least * 1.08, most];
  }

  /** Draws samples: an object of columns, of which `time_ms` is one, over the last `seconds`. */
  draw(samples, seconds) {
    const times = samples.time_ms ?? [];
    const end = times.length ? times[times.length - 1] / 1000 : 0;
    this.between = [end - seconds, end];
    // Steps with nothing measured in between are gaps, not lines across.
    const xs = [];
    const columns = this.series.map(() => []);
    for (let i = 0; i < times.length; i++) {
      if (i > 0 && times[i] - times[i - 1] > 4500) {
        xs.push((times[i - 1] + times[i]) / 2000);
        columns.forEach((c) => c.push(null));
      }
      xs.push(times[i] / 1000);
      this.series.forEach((s, n) => columns[n].push((s.value ? s.value(samples, i) : samples[s.column]?.[i]) ?? null));
    }
    this.data = [xs, ...columns];
    this.nothing.hidden = columns.some((c) => c.some((v) => v != null));
    this.plot.setData(this.data);
    // Who points nowhere sees the latest values.
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

/** Columns of samples that grow by one each second; what is older than `seconds` is dropped. */
export class Samples {
  constructor(seconds) {
    this.seconds = seconds;
    this.columns = {};
  }

  get last() {
    return this.columns.time_ms?.at(-1) ?? 0;
  }

  add(columns) {
    if (!columns.time_ms?.length) return;
    const had = this.columns.time_ms?.length ?? 0;
    for (const [name, values] of Object.entries(columns)) {
      this.columns[name] = (this.columns[name] ?? new Array(had).fill(null)).concat(values);
    }
    const old = this.columns.time_ms.findIndex((t) => t >= this.last - this.seconds * 1000);
    if (old > 0) for (const name of Object.keys(this.columns)) this.columns[name] = this.columns[name].slice(old);
  }

  /** The mean of a column over the last samples. */
  recent(name, samples = 5) {
    const values = (this.columns[name] ?? []).slice(-samples).filter((v) => v != null);
    return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
  }
}

/** Hits per hundred reads over the samples up to `i`, so that single seconds do not make it jump. */
export function hitRatio(samples, i, over = 10) {
  let hits = 0;
  let all = 0;
  for (let k = Math.max(0, i - over + 1); k <= i; k++) {
    hits += samples.hits?.[k] ?? 0;
    all += (samples.hits?.[k] ?? 0) + (samples.misses?.[k] ?? 0);
  }
  return all > 0 ? (100 * hits) / all : null;
}
