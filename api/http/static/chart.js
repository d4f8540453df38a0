// Imbalance by wall-clock time. The picture is made once; new data changes its lines and marks.

import { element, keyed, set, shape, show, text } from "/static/dom.js";
import { at, clock } from "/static/words.js";

const LEFT = 40, RIGHT = 14, TOP = 20, BOTTOM = 22;
const MINUTE = 60, HOUR = 3600, LEAST_RANGE = 2 * MINUTE;
const CROWDED = 24, LABEL_GAP = 4, CROWDED_GAP = 60;  // marks; pixels between two labels
const TIME_STEPS = [MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 15 * MINUTE, 30 * MINUTE,
  HOUR, 2 * HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR];
const LINES = ["contiguous", "measured"];

function niceStep(range, most) {
  const rough = range / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 2.5, 5, 10].map((n) => n * power).find((step) => step >= rough);
}

export class Chart {
  // onPoint(point or null) follows the pointer and the arrow keys.
  constructor(host, onPoint) {
    this.host = host;
    this.onPoint = onPoint;
    this.points = [];
    this.at = null;
    this.empty = element("p", { class: "quiet" }, "No complete window of load in this range.");
    this.svg = shape("svg", { role: "img", tabindex: "0" });
    this.grid = shape("g");
    this.marks = shape("g");
    this.lines = Object.fromEntries(LINES.map((kind) => [kind, shape("path", { class: kind })]));
    this.last = shape("circle", { class: "last", r: 3.5 });
    this.cursor = shape("line", { class: "cursor", visibility: "hidden" });
    this.svg.append(this.grid, this.marks, this.lines.contiguous, this.lines.measured, this.last, this.cursor);
    host.replaceChildren(this.empty, this.svg);
    this.svg.addEventListener("pointermove", (event) => this.#pointAt(event));
    this.svg.addEventListener("pointerleave", () => this.#select(null));
    this.svg.addEventListener("blur", () => this.#select(null));
    this.svg.addEventListener("keydown", (event) => this.#step(event));
  }

  draw(history) {
    this.points = history.points.filter((point) => point.measured !== null);
    show(this.empty, !this.points.length);
    this.svg.style.display = this.points.length ? "" : "none";
    if (!this.points.length) return;
    const width = this.host.clientWidth, height = this.host.clientHeight;
    const highest = Math.max(1.1, ...this.points.flatMap((one) => [one.measured, one.contiguous]));
    const step = niceStep(highest - 1, 4), most = 1 + step * Math.ceil((highest - 1) / step);
    // The axis ends now. A deployment that is younger than the range has the whole width.
    const first = Math.min(this.points[0].time, ...history.marks.map((mark) => mark.time));
    const { until } = history, since = Math.max(history.since, Math.min(first, until - LEAST_RANGE));
    this.x = (time) => LEFT + ((time - since) / (until - since)) * (width - LEFT - RIGHT);
    const y = (value) => TOP + ((most - value) / (most - 1)) * (height - TOP - BOTTOM);
    set(this.svg, { viewBox: `0 0 ${width} ${height}` });
    this.#drawGrid(width, height, since, until, most, step, y);
    this.#drawMarks(history.marks, width, height);
    for (const kind of LINES) set(this.lines[kind], { d: this.#path(history.points, kind, y) });
    const now = this.points.at(-1);
    set(this.last, { cx: this.x(now.time), cy: y(now.measured) });
    set(this.cursor, { y1: TOP, y2: height - BOTTOM });
    const kinds = history.marks.length;
    set(this.svg, { "aria-label": `Imbalance from ${at(since)} to ${at(until)}, now ` +
      `${now.measured.toFixed(2)}, unbalanced ${now.contiguous.toFixed(2)}, marks: ${kinds}` });
  }

  #drawGrid(width, height, since, until, most, step, y) {
    const levels = [];
    for (let value = 1; value <= most + 1e-9; value += step) levels.push(value);
    const gap = TIME_STEPS.find((one) => (until - since) / one <= Math.max(2, width / 90)) ?? TIME_STEPS.at(-1);
    const times = [];
    for (let at = Math.ceil(since / gap) * gap; at <= until; at += gap) {
      if (this.x(at) > LEFT + 16 && this.x(at) < width - 18) times.push(at);
    }
    keyed(this.grid, [...levels.map((value) => ({ value })), ...times.map((time) => ({ time }))],
      (one) => ("value" in one ? `v${one.value.toFixed(3)}` : `t${one.time}`),
      (one) => ("value" in one ? shape("g", {}, shape("line", { class: "grid" }), shape("text", { "text-anchor": "end" }))
        : shape("text", { "text-anchor": "middle" })),
      (node, one) => {
        if ("time" in one) {
          set(node, { x: this.x(one.time).toFixed(1), y: height - 6 });
          text(node, clock(one.time));
          return;
        }
        set(node.children[0], { x1: LEFT, x2: width - RIGHT, y1: y(one.value), y2: y(one.value) });
        set(node.children[1], { x: LEFT - 6, y: y(one.value) + 4 });
        text(node.children[1], one.value.toFixed(2));
      });
  }

  #drawMarks(marks, width, height) {
    keyed(this.marks, marks, (mark) => `${mark.kind}${mark.time}`,
      (mark) => shape("g", { class: `mark ${mark.kind}` },
        shape("title", {}, `${at(mark.time)} ${mark.kind}: ${mark.text}`),
        shape("line"), shape("line", { class: "wide" }), shape("text", { "text-anchor": "middle" })),
      (node, mark) => {
        const x = this.x(mark.time).toFixed(1);
        for (const line of [node.children[1], node.children[2]]) set(line, { x1: x, x2: x, y1: TOP, y2: height - BOTTOM });
        set(node.children[3], { x, y: TOP - 7 });
      });
    // A death keeps its label where others are too near. Of many rebalances, those without a label
    // have a short line at the top: as many long ones would hide the curve.
    const isCrowded = marks.length > CROWDED, gap = isCrowded ? CROWDED_GAP : LABEL_GAP;
    const isCommit = ({ generation }) => generation !== null, isDeath = ({ kind }) => kind === "death";
    const byRank = [...marks.keys()].sort((a, b) => isDeath(marks[b]) - isDeath(marks[a]) ||
      isCommit(marks[a]) - isCommit(marks[b]) || b - a);
    const taken = [];
    for (const number of byRank) {
      const mark = marks[number], name = isCommit(mark) ? `g${mark.generation}` : mark.kind;
      const half = 3.6 * name.length, left = this.x(mark.time) - half, right = left + 2 * half;
      const fits = right < width && taken.every(([from, to]) => right < from - gap || left > to + gap);
      const [, line, , label] = this.marks.children[number].children;
      text(label, fits ? name : "");
      if (fits) taken.push([left, right]);
      if (isCrowded && !fits && isCommit(mark)) set(line, { y2: TOP + 8 });
    }
  }

  #path(points, kind, y) {
    let path = "", isDrawn = false;
    for (const point of points) {
      if (point[kind] === null) { isDrawn = false; continue; }
      const at = `${this.x(point.time).toFixed(1)} ${y(point[kind]).toFixed(1)}`;
      // A point alone is a line of no length, which a round cap makes a dot.
      path += isDrawn && point.is_joined ? `L${at}` : `M${at}h0`;
      isDrawn = true;
    }
    return path;
  }

  #pointAt(event) {
    const at = event.clientX - this.svg.getBoundingClientRect().left;
    const near = this.points.reduce((best, point) =>
      (Math.abs(this.x(point.time) - at) < Math.abs(this.x(best.time) - at) ? point : best));
    this.#select(near);
  }

  #step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by === undefined || !this.points.length) return;
    event.preventDefault();
    const from = this.at === null ? this.points.length - 1 : this.points.findIndex((one) => one.time >= this.at);
    this.#select(this.points[Math.max(0, Math.min(this.points.length - 1, from + by))]);
  }

  #select(point) {
    this.at = point === null ? null : point.time;
    set(this.cursor, { visibility: point === null ? "hidden" : "visible" });
    if (point !== null) set(this.cursor, { x1: this.x(point.time), x2: this.x(point.time) });
    this.onPoint(point);
  }
}
