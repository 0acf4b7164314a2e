// Runs a model over samples with onnxruntime-web's XNNPACK provider: `node web_runner.mjs FOLDER`.
// FOLDER and its files are those of edgekit/devices/process/exchange.py; the job's `runtime` is the folder with node_modules.
// It exits with 0 when it could write run.json, even if that holds a refusal.

import { closeSync, existsSync, mkdirSync, openSync, readFileSync, renameSync, writeFileSync, writeSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import process from "node:process";

const ARRAYS = {
  float32: Float32Array, float64: Float64Array, int8: Int8Array, uint8: Uint8Array, int16: Int16Array,
  uint16: Uint16Array, int32: Int32Array, uint32: Uint32Array, int64: BigInt64Array, uint64: BigUint64Array,
  bool: Uint8Array, float16: Uint16Array,
};

const folder = process.argv[2];
const job = JSON.parse(readFileSync(join(folder, "job.json"), "utf8"));
const run = {
  status: "running", message: "", load_ms: 0, latency_ms: [], peak_rss_bytes: 0,
  versions: { node: process.versions.node }, placement: [], placement_source: "log", placed_whole: "",
};

const log = openSync(join(folder, "log.txt"), "w");
let placing = "";
for (const channel of ["log", "info", "debug", "warn", "error"]) {
  console[channel] = (...words) => words.join(" ").split("\n").forEach(readLogLine);
}

function readLogLine(line) {
  const whole = line.match(/All nodes placed on \[(\w+)\]/);
  const part = line.match(/Node\(s\) placed on \[(\w+)\]/);
  const node = placing && line.match(/\]\s{2,}(\w+) \((.*)\)\s*$/);
  if (whole) run.placed_whole = whole[1];
  else if (part) placing = part[1];
  else if (node) run.placement.push({ name: node[2], op: node[1], domain: "", provider: placing });
  else placing = "";
  writeSync(log, line + "\n");
}

function writeWhole(path, parts) {
  writeFileSync(path + ".part", Buffer.concat(parts));
  renameSync(path + ".part", path);
}

function writeRun() {
  run.peak_rss_bytes = peakRssBytes();
  writeWhole(join(folder, "run.json"), [Buffer.from(JSON.stringify(run))]);
}

// VmHWM where there is a /proc: maxRSS also counts the parent before the exec.
function peakRssBytes() {
  const status = existsSync("/proc/self/status") ? readFileSync("/proc/self/status", "utf8") : "";
  const line = status.match(/^VmHWM:\s+(\d+) kB$/m);
  return (line ? Number(line[1]) : process.resourceUsage().maxRSS) * 1024;
}

function readTensors(path, ort) {
  const data = readFileSync(path);
  let offset = data.indexOf(10) + 1;
  const feeds = {};
  for (const entry of JSON.parse(data.toString("utf8", 0, offset))) {
    const payload = data.subarray(offset, offset + entry.size_bytes);
    feeds[entry.name] = new ort.Tensor(entry.dtype, decode(entry, payload), entry.shape);
    offset += entry.size_bytes;
  }
  return feeds;
}

function decode(entry, payload) {
  if (entry.dtype === "string") return JSON.parse(payload.toString("utf8"));
  const kind = ARRAYS[entry.dtype];
  if (!kind) throw new Error(`onnxruntime-web 1.16.3 has no tensors of ${entry.dtype} (input '${entry.name}')`);
  return new kind(new Uint8Array(payload).buffer);
}

function writeTensors(path, names, values) {
  const entries = [];
  const payloads = [];
  for (const name of names) {
    const { type, data, dims } = values[name];
    const payload = type === "string" ? Buffer.from(JSON.stringify(data)) : Buffer.from(data.buffer, data.byteOffset, data.byteLength);
    entries.push({ name, dtype: type, shape: dims, size_bytes: payload.length });
    payloads.push(payload);
  }
  writeWhole(path, [Buffer.from(JSON.stringify(entries) + "\n"), ...payloads]);
}

async function runSamples() {
  const ort = createRequire(join(job.runtime, "package.json"))("onnxruntime-web");
  run.versions["onnxruntime-web"] = ort.env.versions.web;
  Object.assign(ort.env.wasm, { numThreads: 1, simd: true });
  Object.assign(ort.env, { logLevel: "verbose", debug: true });
  const model = readFileSync(job.model);
  const start = performance.now();
  const options = {
    executionProviders: ["xnnpack"], graphOptimizationLevel: job.level, logSeverityLevel: 0, logVerbosityLevel: 0,
    extra: sessionConfig(),
  };
  const session = await ort.InferenceSession.create(model, options);
  run.load_ms = performance.now() - start;
  writeRun();
  mkdirSync(join(folder, "out"));
  const started = performance.now();
  for (let index = 0; index < job.samples; index++) {
    if (index >= job.least_samples && performance.now() - started > job.budget_s * 1e3) return "stopped";
    const name = String(index).padStart(5, "0") + ".tensors";
    const feeds = readTensors(join(folder, "in", name), ort);
    for (let turn = 0; index === 0 && turn < job.warmup; turn++) await session.run(feeds);
    let values = {};
    for (let turn = 0; turn < job.repeat; turn++) {
      const begin = performance.now();
      values = await session.run(feeds);
      run.latency_ms.push(performance.now() - begin);
    }
    writeTensors(join(folder, "out", name), session.outputNames, values);
  }
  return "done";
}

function sessionConfig() {
  const extra = {};
  for (const [key, value] of Object.entries(job.session_config)) {
    const words = key.split(".");
    const last = words.pop();
    let place = extra;
    for (const word of words) place = place[word] ??= {};
    place[last] = value;
  }
  return extra;
}

// A C++ exception arrives as the bare number of its address, or as an Error without words.
function describeError(error) {
  const text = typeof error === "number" ? "" : String(error?.message ?? error).split("\n")[0];
  const where = run.load_ms === 0 ? "session creation" : `sample ${run.latency_ms.length}`;
  return /[a-z]/i.test(text) ? text : `${where} failed with a C++ exception inside onnxruntime-web`;
}

try {
  run.status = await runSamples();
} catch (error) {
  run.status = "refused";
  run.message = describeError(error);
}
writeRun();
closeSync(log);
process.exit(0);
