import type { InferenceSession, TensorConstructor } from "onnxruntime-common";

import { readRows } from "./npz";
import { LoaderError, type ModelBundle, type ModelTensor } from "./variant";

type Numbers = ArrayLike<number | bigint>;

/** An element type: its name in numpy, its size, if distances between its values mean something, and its array. */
interface Dtype {
  readonly numpy: string;
  readonly bytes: number;
  readonly numeric: boolean;
  readonly view: (buffer: ArrayBuffer) => Numbers;
}

const DTYPES: Readonly<Record<string, Dtype>> = {
  float32: { numpy: "<f4", bytes: 4, numeric: true, view: (buffer) => new Float32Array(buffer) },
  float64: { numpy: "<f8", bytes: 8, numeric: true, view: (buffer) => new Float64Array(buffer) },
  int8: { numpy: "|i1", bytes: 1, numeric: true, view: (buffer) => new Int8Array(buffer) },
  uint8: { numpy: "|u1", bytes: 1, numeric: true, view: (buffer) => new Uint8Array(buffer) },
  int16: { numpy: "<i2", bytes: 2, numeric: true, view: (buffer) => new Int16Array(buffer) },
  uint16: { numpy: "<u2", bytes: 2, numeric: true, view: (buffer) => new Uint16Array(buffer) },
  int32: { numpy: "<i4", bytes: 4, numeric: false, view: (buffer) => new Int32Array(buffer) },
  int64: { numpy: "<i8", bytes: 8, numeric: false, view: (buffer) => new BigInt64Array(buffer) },
  bool: { numpy: "|b1", bytes: 1, numeric: false, view: (buffer) => new Uint8Array(buffer) },
};

function find(tensor: ModelTensor): Dtype {
  const dtype = DTYPES[tensor.dtype];
  if (dtype === undefined) throw new LoaderError(`tensors of ${tensor.dtype} have no self-test here`);
  return dtype;
}

const count = (tensor: ModelTensor): number => tensor.shape.reduce((product, size) => product * size, 1);

/** Compares what a session makes of the golden samples with what the float model, or this very model, made of them. */
export async function runSelfTest(
  bundle: ModelBundle,
  session: InferenceSession,
  Tensor: TensorConstructor,
  read: (name: string) => Promise<Uint8Array>,
): Promise<string[]> {
  const whole = bundle.reference === "outputs";
  const load = async (name: string, tensors: readonly ModelTensor[], rows: number): Promise<Rows> =>
    new Rows(await read(name), name, tensors, rows);
  const inputs = await load(`${bundle.golden}/inputs.npz`, bundle.inputs, bundle.samples);
  const rows = bundle.chosen.length;
  const expected = rows ? await load("golden/expected.npz", bundle.outputs, rows) : undefined;
  const wanted = whole ? await load(`${bundle.golden}/outputs.npz`, bundle.outputs, bundle.samples) : expected;
  const sums = new Map(bundle.outputs.map((tensor) => [tensor.name, new Sums()]));
  const failures: string[] = [];
  for (let index = 0; index < bundle.samples; index += 1) {
    const row = bundle.chosen.indexOf(index);
    if (!whole && row < 0) continue; // a sample of another bundle's self-test
    const fed: Record<string, InstanceType<TensorConstructor>> = {};
    for (const tensor of bundle.inputs) {
      fed[tensor.name] = new Tensor(tensor.dtype as "float32", inputs.take(tensor, index) as Float32Array, tensor.shape);
    }
    const got = await session.run(fed, bundle.outputs.map((tensor) => tensor.name));
    for (const tensor of bundle.outputs) {
      const { dims, type, data } = got[tensor.name]!;
      if (type !== tensor.dtype || dims.join() !== tensor.shape.join()) {
        return [`output '${tensor.name}' is ${type}[${dims.join(", ")}]`];
      }
      sums.get(tensor.name)!.add(wanted!.take(tensor, whole ? index : row), data as Numbers, tensor);
      const limit = bundle.tolerance[tensor.name];
      if (row < 0 || limit === undefined) continue;
      const distance = farthest(expected!.take(tensor, row), data as Numbers);
      if (!(distance <= limit)) {
        failures.push(`output '${tensor.name}' of sample ${index} is off by ${distance}, at most ${limit}`);
      }
    }
  }
  return [...failures, ...bundle.outputs.flatMap((tensor) => sums.get(tensor.name)!.judge(tensor, bundle))];
}

function farthest(should: Numbers, got: Numbers): number {
  let distance = 0;
  for (let index = 0; index < should.length; index += 1) {
    const off = Math.abs(Number(should[index]) - Number(got[index]));
    if (!(off <= distance)) distance = off; // NaN stays
    if (Number.isNaN(distance)) break;
  }
  return distance;
}

/** The rows of each tensor of an .npz. */
class Rows {
  private readonly bytes: ReadonlyMap<string, Uint8Array>;

  constructor(archive: Uint8Array, file: string, tensors: readonly ModelTensor[], rows: number) {
    const described = tensors.map((tensor) => {
      const { numpy, bytes } = find(tensor);
      return { name: tensor.name, numpy, size: rows * count(tensor) * bytes };
    });
    this.bytes = readRows(archive, file, described);
  }

  /** A row in a buffer of its own: the plug-in 1.24.3 reads a buffer from its beginning, wherever an array begins. */
  take(tensor: ModelTensor, row: number): Numbers {
    const size = count(tensor) * find(tensor).bytes;
    const copy = this.bytes.get(tensor.name)!.slice(row * size, (row + 1) * size);
    return find(tensor).view(copy.buffer as ArrayBuffer);
  }
}

/** The sums of one output over all samples, from which the metrics follow. */
class Sums {
  private samples = 0;
  private elements = 0;
  private matches = 0;
  private faulty = 0;
  private dot = 0;
  private wanted = 0;
  private got = 0;
  private error = 0;
  private ranked = 0;
  private agreed = 0;

  add(should: Numbers, found: Numbers, tensor: ModelTensor): void {
    let best = -Infinity, top = -Infinity, topWanted = -Infinity;
    this.samples += 1;
    this.elements += should.length;
    for (let index = 0; index < should.length; index += 1) {
      if (should[index] === found[index]) this.matches += 1;
      if (!find(tensor).numeric) continue;
      const want = Number(should[index]), have = Number(found[index]);
      if (!Number.isFinite(want) || !Number.isFinite(have)) this.faulty += 1;
      this.dot += want * have;
      this.wanted += want * want;
      this.got += have * have;
      this.error += (have - want) ** 2;
      best = Math.max(best, want);
      if (have > top) [top, topWanted] = [have, want];
    }
    if (!find(tensor).numeric || should.length < 2 || !tensor.shape.includes(should.length)) return;
    this.ranked += 1;
    if (topWanted >= best) this.agreed += 1;
  }

  judge(tensor: ModelTensor, { thresholds: limits }: ModelBundle): string[] {
    const { name } = tensor;
    if (this.elements === 0 || this.faulty > 0) {
      return [`output '${name}' has ${this.faulty} values that are NaN or infinite, of ${this.elements}`];
    }
    const shares: [what: string, value: number, least: number][] = [];
    if (find(tensor).numeric) {
      const norm = Math.sqrt(this.wanted) * Math.sqrt(this.got);
      shares.push(["cosine", norm > 0 ? this.dot / norm : Number(this.wanted === this.got), limits.min_cosine]);
      shares.push(["SQNR in dB", decibels(this.wanted, this.error), limits.min_sqnr_db]);
    } else {
      shares.push(["exact match", this.matches / this.elements, limits.min_top1_agreement]);
    }
    if (this.ranked > 0) {
      // Few samples: one that differs would be a larger share than the limit means.
      const least = limits.min_top1_agreement - limits.granted_samples / this.samples;
      shares.push(["top-1 agreement", this.agreed / this.ranked, least]);
    }
    return shares
      .filter(([, value, least]) => !(value >= least))
      .map(([what, value, least]) => `output '${name}': ${what} ${value.toFixed(4)}, least ${least.toFixed(4)}`);
  }
}

function decibels(signal: number, noise: number): number {
  if (noise <= 0) return 200;
  return signal <= 0 ? -200 : Math.max(-200, Math.min(200, 10 * Math.log10(signal / noise)));
}
