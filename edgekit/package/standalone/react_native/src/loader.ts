import { sha256 } from "@noble/hashes/sha2";
import { bytesToHex } from "@noble/hashes/utils";
import type { InferenceSession, InferenceSessionFactory, TensorConstructor } from "onnxruntime-common";

import { ASSETS, bundles } from "./bundles";
import type { Files } from "./files";
import { runSelfTest } from "./self_test";
import { LoaderError, type ModelBundle } from "./variant";

/** What an app has: `import * as ort from "onnxruntime-react-native"` is the runtime. */
export interface Device {
  readonly ort: { readonly InferenceSession: InferenceSessionFactory; readonly Tensor: TensorConstructor };
  readonly files: Files;
  /** `Platform.OS` */
  readonly os: string;
  /** The ONNX Runtime that Gradle or CocoaPods links: the plug-in cannot be asked for it. */
  readonly version: string;
}

/** A session with the bundle that it came from, and why the bundles before it could not be opened. */
export interface Opened {
  readonly session: InferenceSession;
  readonly bundle: ModelBundle;
  readonly refusals: readonly string[];
}

const CHUNK = 1 << 20;

/**
 * Opens the bundles of this package: checks every file, then gives the session what the manifest says. Nothing falls
 * back to the CPU in silence: `onCpu` must be asked for.
 */
export class Loader {
  constructor(
    private readonly device: Device,
    private readonly onCpu = false,
  ) {}

  /** Opens the first bundle that this device can run, and says why those before it could not be opened. */
  async openFirst(): Promise<Opened> {
    const refusals: string[] = [];
    for (const bundle of bundles) {
      try {
        return { session: await this.open(bundle), bundle, refusals };
      } catch (error) {
        refusals.push(`${bundle.name}: ${error instanceof Error ? error.message : error}`);
      }
    }
    throw new LoaderError(`no bundle can be opened here: ${refusals.join("; ")}`);
  }

  /** Opens one bundle. */
  async open(bundle: ModelBundle): Promise<InferenceSession> {
    const { ort, files, os, version } = this.device;
    if (isOlder(version, bundle.minimum_ort)) {
      throw new LoaderError(`'${bundle.name}' needs ONNX Runtime ${bundle.minimum_ort}, this is ${version}`);
    }
    if (!this.onCpu && bundle.systems.length && !bundle.systems.includes(os)) {
      throw new LoaderError(`'${bundle.name}' is for ${bundle.provider}, which ${os} has not`);
    }
    await this.checkFiles(bundle);
    // By its path: of a model in memory the plug-in 1.24.3 forgets every option.
    const session = this.onCpu ? { executionProviders: ["cpu"] } : bundle.session;
    try {
      return await ort.InferenceSession.create(files.path(place(bundle, bundle.model)), session);
    } catch (error) {
      throw new LoaderError(`'${bundle.name}' cannot be opened here: ${error instanceof Error ? error.message : error}`);
    }
  }

  /** Rejects if a file of the bundle is missing or has another sha256 than it was packed with. */
  async checkFiles(bundle: ModelBundle): Promise<void> {
    for (const [name, { sha256: wanted, size_bytes: size }] of Object.entries(bundle.files)) {
      const file = place(bundle, name);
      if ((await this.digest(file, size)) === wanted) continue;
      try {
        await this.device.files.unpack(file);
      } catch (error) {
        throw new LoaderError(`'${name}' of bundle '${bundle.name}' cannot be read: ${error}`);
      }
      if ((await this.digest(file, size)) !== wanted) {
        throw new LoaderError(`'${name}' of bundle '${bundle.name}' was altered: its sha256 is another`);
      }
    }
  }

  /** Runs the golden samples and returns every reason why the outputs do not reach the thresholds; none is a pass. */
  runSelfTest(session: InferenceSession, bundle: ModelBundle): Promise<string[]> {
    const read = async (name: string): Promise<Uint8Array> => {
      const known = bundle.files[name];
      if (known === undefined) throw new LoaderError(`bundle '${bundle.name}' has no '${name}'`);
      return this.device.files.read(place(bundle, name), 0, known.size_bytes);
    };
    return runSelfTest(bundle, session, this.device.ort.Tensor, read);
  }

  /** Returns the sha256 of a file, "" where there is none of this size. */
  private async digest(file: string, size: number): Promise<string> {
    const { files } = this.device;
    if ((await files.size(file).catch(() => -1)) !== size) return "";
    const hash = sha256.create();
    for (let at = 0; at < size; at += CHUNK) hash.update(await files.read(file, at, Math.min(CHUNK, size - at)));
    return bytesToHex(hash.digest());
  }
}

/** Returns where a file lies below `assets/`; names that begin with `../` lie beside the bundle's folder. */
function place(bundle: ModelBundle, name: string): string {
  return name.startsWith("../") ? `${ASSETS}/${name.slice(3)}` : `${ASSETS}/${bundle.name}/${name}`;
}

function isOlder(version: string, least: string): boolean {
  const [have, need] = [version, least].map((text) => text.split(".").map((part) => parseInt(part, 10)));
  for (let index = 0; index < 3; index += 1) {
    const difference = (have![index] ?? 0) - (need![index] ?? 0);
    // What is no number says nothing, and is refused.
    if (difference !== 0) return !(difference > 0);
  }
  return false;
}
