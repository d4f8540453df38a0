// Figures and events as people read them.

import { element } from "/static/dom.js";

export const count = (number) => number.toLocaleString("en");
export const plural = (number, noun, many = `${noun}s`) => `${count(number)} ${number === 1 ? noun : many}`;

export function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log10(Math.max(1, bytes)) / 3));
  return `${(bytes / 1000 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}

export const ABSENT = ["gone", "retired", "joining"];  // phases of ranks that do not serve

// Ranks in ascending order, many as stretches: 0-7, 12.
export function stretches(ranks) {
  if (ranks.length <= 8) return ranks.join(", ");
  const found = [];
  for (const rank of ranks) {
    if (found.at(-1)?.[1] === rank - 1) found.at(-1)[1] = rank;
    else found.push([rank, rank]);
  }
  return found.map(([first, last]) => (first === last ? first : `${first}-${last}`)).join(", ");
}

// "gpu7:4242:9f31c2aa-8812345-5be012" is a process of a host.
const process = (holder) => {
  const [, host, number] = /^(.*):(\d+):[0-9a-f]{8}-\d+-[0-9a-f]+$/.exec(holder) ?? [];
  return host === undefined ? holder : `process ${number} on host ${host}`;
};
const why = (detail) => (detail.actor ? `, by ${detail.actor}` : "") + (detail.reason ? `: ${detail.reason}` : "");
const SENTENCES = {
  abort: (d) => `Plan ${d.plan_id} was aborted${why(d)}`,
  check: (d) => `eplb check ran on host ${d.host}`,
  checkpoint: (d) => `${d.by} stored the identity of the checkpoint`,
  commit: (d) => `Generation ${d.generation} serves${why(d)}`,
  compile: (d) => `The controller, ${process(d.holder)}, ` + (d.state === "begun" ? "compiles the planner's kernels"
    : `has compiled the planner's kernels: ${plural(d.functions, "function")} in ${took(d.seconds)}`),
  control: (d) => `Movement is ${d.movement ? "on" : "off"}, observe is ${d.observe ? "on" : "off"}${why(d)}`,
  deployment: (d) => `${d.by} started`,
  error: (d) => `${d.where}: ${d.message}`,
  fault: (d) => `A fault for trial: ${d.message}`,
  lease: (d) => `The lease of the ${d.of}: ${process(d.holder)} ` +
    (d.state === "leads" ? "has it" : `lost it${why(d)}`),
  membership: (d) => `Ranks ${stretches(d.survivors)} serve on in membership ${d.membership}, ` +
    `${plural(d.refills, "expert")} loaded${why(d)}`,
  members: (d) => `Operation ${d.id} for ranks ${stretches(d.wanted ?? [])} is ${d.state}${why(d)}`,
  outage: (d) => `Tokens are served again after ${fixed(d.unserved_s)} s without any${why(d)}`,
  pace: (d) => `The next migration has ${d.part} of the deployment's pace: ${d.reason}`,
  promise: (d) => `Generation ${d.generation} was to lower the imbalance by ${fixed(d.promised)} and did by ${fixed(d.given)}`,
  proposal: (d) => `Proposal ${d.proposal} is ${d.state}${why(d)}`,
  publish: (d) => `Plan ${d.plan_id} is offered: ${plural(d.moves, "move")} in ` +
    `${plural(d.transactions, "transaction")}, to generation ${d.generation}`,
  recovery: (d) => `Ranks ${stretches(d.survivors ?? [])} continue with generation ${d.generation}${why(d)}`,
  reject: (d) => `Plan ${d.plan_id} was rejected${why(d)}`,
  restart: (d) => `All ranks start again without rank ${stretches(d.lost)}${why(d)}`,
  restore: (d) => `A rank wrote what the store had lost${why(d)}`,
  run: (d) => `The ranks started: run ${d.run}, windows of ${plural(d.window_steps, "step")}`,
  samples: (d) => `Samples: ${plain(d.samples)}`,
  scrub: (d) => `Scrub of rank ${d.rank}: ${d.result}${why(d)}`,
  settings: (d) => `Settings were changed: ${plain(d.live)}${why(d)}`,
  task: (d) => `Request ${d.task} (${d.kind}) is ${d.state}`,
};

const fixed = (value) => (Number.isInteger(value) ? count(value) : Number(value).toFixed(3));

// A value of any kind without brackets and quotes.
function plain(value) {
  if (typeof value === "number") return fixed(value);
  if (Array.isArray(value)) return value.map(plain).join(", ");
  if (value === null || typeof value !== "object") return String(value);
  return Object.entries(value).map(([key, one]) => `${key.replaceAll("_", " ")} ${plain(one)}`).join(", ");
}

export function sentence(event) {
  const text = (SENTENCES[event.kind] ?? plain)(event.detail);
  return /[.!?]$/.test(text) ? text : `${text}.`;
}

export const took = (seconds) => (seconds < 100 ? `${seconds.toFixed(1)} s` : `${Math.round(seconds / 60)} min`);

export function ago(seconds) {
  if (seconds < 100) return `${Math.max(0, Math.round(seconds))} s ago`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min ago`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
}

// As commands print it: 2026-11-27 09:38:59Z.
export const at = (seconds) => `${new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " ")}Z`;
export const clock = (seconds) => at(seconds).slice(11, 16);
export const when = (seconds) => element("time", { class: "when",
  datetime: new Date(seconds * 1000).toISOString() }, at(seconds));

// What made the plan due, at whose word, in which stage of the rollout.
export const origin = (one) => [
  one.trigger && `trigger ${one.trigger}`, one.actor && `by ${one.actor}`, one.stage && `stage ${one.stage}`,
].filter(Boolean).join(" · ");

// A reduction of imbalance, as its change: less is better.
export const change = (gain) => `${gain > 0 ? "−" : gain < 0 ? "+" : ""}${Math.abs(gain).toFixed(3)}`;

export function realised(one) {
  if (one.plan_id == null) return "";
  if (one.gain_realised != null) {
    return `realised ${change(one.gain_realised)}` +
      (one.gain_promised == null ? "" : ` of ${change(one.gain_promised)} promised`);
  }
  if (one.outcome !== "committed") return one.outcome ?? "migration open";
  return one.trigger === "rollback" ? "committed; a rollback promises no gain" : "committed, not judged yet";
}

// Its parts break as wholes.
export const parted = (text) => text.split(" · ").flatMap((part, at) =>
  [at ? " · " : "", element("span", { class: "part" }, part)]);

export function decisionFigures(decision) {
  const parts = [];
  if (decision.imbalance_before != null) {
    const after = decision.imbalance_after == null ? "" : ` → ${decision.imbalance_after.toFixed(3)} predicted`;
    parts.push(`imbalance ${decision.imbalance_before.toFixed(3)}${after}`);
  }
  if (decision.moves) parts.push(`${plural(decision.moves, "move")}, ${size(decision.bytes ?? 0)}`);
  if (decision.num_uncovered) parts.push(`${plural(decision.num_uncovered, "expert")} in fewer failure domains than asked for`);
  if (decision.policy) parts.push(`policy ${decision.policy}`);
  if (decision.generation != null) parts.push(`generation ${decision.generation}`);
  return parts.join(" · ");
}
