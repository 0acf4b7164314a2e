import { LoaderError } from "./variant";

/** Where the package's assets lie on the device; names are those below `assets/`. */
export interface Files {
  /** The path that ONNX Runtime opens. */
  path(name: string): string;
  /** Bytes of a file; rejects where there is none. */
  size(name: string): Promise<number>;
  /** Exactly `length` bytes from `start`. */
  read(name: string, start: number, length: number): Promise<Uint8Array>;
  /** Puts the file where `path` says, again where it is there; nothing where it cannot lie elsewhere. */
  unpack(name: string): Promise<void>;
}

/** What is asked of `@dr.pogodin/react-native-fs`, or of `react-native-fs`, whose functions have the same names. */
export interface FileSystem {
  readonly MainBundlePath?: string;
  readonly DocumentDirectoryPath: string;
  mkdir(path: string): Promise<unknown>;
  stat(path: string): Promise<{ size: number }>;
  read(path: string, length: number, position: number, encoding: "base64"): Promise<string>;
  copyFileAssets(from: string, into: string): Promise<unknown>;
}

/**
 * Returns the files of an app. On iOS they are files of its bundle. On Android they lie compressed in the APK, and ONNX
 * Runtime opens paths: they are copied into the folder `edgekit` of the app's documents, one folder for each `version`.
 */
export function deviceFiles(fs: FileSystem, os: string, version: string): Files {
  const inApk = os === "android";
  const folder = inApk ? `${fs.DocumentDirectoryPath}/edgekit/${version}` : fs.MainBundlePath;
  const path = (name: string): string => `${folder}/${name}`;
  return {
    path,
    size: async (name) => Number((await fs.stat(path(name))).size),
    read: async (name, start, length) => {
      const bytes = decodeBase64(await fs.read(path(name), length, start, "base64"));
      if (bytes.length !== length) throw new LoaderError(`'${name}' is cut off`);
      return bytes;
    },
    unpack: async (name) => {
      if (!inApk) return;
      await fs.mkdir(path(name).slice(0, path(name).lastIndexOf("/")));
      await fs.copyFileAssets(name, path(name));
    },
  };
}

const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/** Returns bytes; Hermes has no decoder in each version that is in use. */
function decodeBase64(text: string): Uint8Array {
  const letters = text.replace(/[\s=]/g, "");
  const bytes = new Uint8Array((letters.length * 3) >> 2);
  let held = 0, at = 0;
  for (let index = 0; index < letters.length; index += 1) {
    held = (held << 6) | LETTERS.indexOf(letters[index]!);
    if (index % 4 > 0) bytes[at++] = (held >> (6 - 2 * (index % 4))) & 0xff;
  }
  return bytes;
}
