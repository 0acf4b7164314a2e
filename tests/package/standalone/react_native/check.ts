// Opens bundles as an app does, with ONNX Runtime for Node: its API is the plug-in's. `node check.js JSON`
import * as disk from "node:fs/promises";
import * as ort from "onnxruntime-node";

import { bundles, deviceFiles, Loader, VERSION, type FileSystem } from "./src/index";

interface Given {
  readonly assets: string;
  readonly documents: string;
  readonly os: string;
  readonly version: string;
  readonly only?: string;
  readonly cpu?: boolean;
}

const given = JSON.parse(process.argv[2]!) as Given;

/** The functions of `react-native-fs` on this machine's disk; the folder `assets` stands for an APK. */
const fs: FileSystem = {
  MainBundlePath: given.assets,
  DocumentDirectoryPath: given.documents,
  mkdir: (path) => disk.mkdir(path, { recursive: true }),
  stat: (path) => disk.stat(path),
  copyFileAssets: (from, into) => disk.copyFile(`${given.assets}/${from}`, into),
  read: async (path, length, position, encoding) => {
    const file = await disk.open(path);
    try {
      const { buffer, bytesRead } = await file.read(Buffer.alloc(length), 0, length, position);
      return buffer.subarray(0, bytesRead).toString(encoding);
    } finally {
      await file.close();
    }
  },
};

async function main(): Promise<void> {
  const files = deviceFiles(fs, given.os, VERSION);
  const loader = new Loader({ ort, files, os: given.os, version: given.version }, given.cpu);
  const only = bundles.find((bundle) => bundle.name === given.only);
  const opened = only ? { session: await loader.open(only), bundle: only, refusals: [] } : await loader.openFirst();
  for (const refusal of opened.refusals) console.log(refusal);
  const failures = await loader.runSelfTest(opened.session, opened.bundle);
  console.log(`${opened.bundle.name}: ${failures.join("; ") || "self-test passed"}`);
}

main().catch((error: Error) => {
  console.log(`${error.constructor.name}: ${error.message}`);
  process.exitCode = 1;
});
