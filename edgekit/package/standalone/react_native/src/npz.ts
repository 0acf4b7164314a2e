import { LoaderError } from "./variant";

/** A tensor of an .npz: its element type as numpy writes it, and the bytes of all its rows. */
export interface Described {
  readonly name: string;
  readonly numpy: string;
  readonly size: number;
}

/** Returns the bytes of each tensor of an .npz, which is a zip of .npy files that are stored, not compressed. */
export function readRows(archive: Uint8Array, file: string, tensors: readonly Described[]): Map<string, Uint8Array> {
  const entries = listEntries(archive, file);
  const found = new Map<string, Uint8Array>();
  for (const { name, numpy, size } of tensors) {
    const entry = entries.get(`${name}.npy`);
    if (entry === undefined || entry.length < 10) throw new LoaderError(`'${file}' lacks '${name}'`);
    const header = 10 + number(entry, 8, 2);
    if (entry.length - header !== size || !text(entry.subarray(10, header)).includes(`'${numpy}'`)) {
      throw new LoaderError(`the golden samples of '${name}' in '${file}' have another type or number`);
    }
    found.set(name, entry.subarray(header));
  }
  return found;
}

function listEntries(archive: Uint8Array, file: string): Map<string, Uint8Array> {
  const entries = new Map<string, Uint8Array>();
  let at = 0;
  while (number(archive, at, 4) === 0x04034b50) {
    const extra = at + 30 + number(archive, at + 26, 2);
    const begin = extra + number(archive, at + 28, 2);
    if (number(archive, at + 6, 2) & 8 || number(archive, at + 8, 2) !== 0) {
      throw new LoaderError(`'${file}' is compressed`);
    }
    let size = number(archive, at + 22, 4);
    // zip64: the size stands in the extra field.
    if (size === 0xffffffff && number(archive, extra, 2) === 1) size = number(archive, extra + 4, 8);
    if (size > archive.length - begin) throw new LoaderError(`'${file}' is cut off`);
    entries.set(text(archive.subarray(at + 30, extra)), archive.subarray(begin, begin + size));
    at = begin + size;
  }
  return entries;
}

function number(bytes: Uint8Array, at: number, size: number): number {
  let value = 0;
  for (let index = at + size - 1; index >= at; index -= 1) value = value * 256 + (bytes[index] ?? 0);
  return value;
}

/** Decodes UTF-8; Hermes has no TextDecoder in each version that is in use. */
function text(bytes: Uint8Array): string {
  return decodeURIComponent(Array.from(bytes, (byte) => `%${byte.toString(16).padStart(2, "0")}`).join(""));
}
