import type { InferenceSession } from "onnxruntime-common";

/** A model input or output; the shape is that of one sample. */
export interface ModelTensor {
  readonly name: string;
  /** numpy's name, such as "float32" */
  readonly dtype: string;
  readonly shape: readonly number[];
}

/** What the loader must know of a bundle; `bundles`, which is made from the manifests, holds one for each. */
export interface ModelBundle {
  readonly name: string;
  readonly target: string;
  readonly precision: string;
  readonly provider: string;
  /** The systems that have the provider, as `Platform.OS` calls them. */
  readonly systems: readonly string[];
  /** The session of the manifest, in the words of the plug-in. */
  readonly session: InferenceSession.SessionOptions;
  readonly minimum_ort: string;
  readonly model: string;
  /** Names lie below the bundle's folder, or beside it (`../`). */
  readonly files: Readonly<Record<string, { readonly sha256: string; readonly size_bytes: number }>>;
  readonly inputs: readonly ModelTensor[];
  readonly outputs: readonly ModelTensor[];
  /** The folder of `inputs.npz`, below the bundle's or beside it. */
  readonly golden: string;
  /** By the float model's outputs of every sample, or by this model's own of those chosen. */
  readonly reference: "outputs" | "expected";
  readonly samples: number;
  readonly thresholds: {
    readonly min_cosine: number;
    readonly min_sqnr_db: number;
    readonly min_top1_agreement: number;
    readonly granted_samples: number;
  };
  readonly chosen: readonly number[];
  readonly tolerance: Readonly<Record<string, number>>;
  /** For each input that holds state, the output of the step before that it comes from. */
  readonly feeds: Readonly<Record<string, string>>;
}

/** A bundle is damaged, or cannot be opened on this device; the message says which and why. */
export class LoaderError extends Error {}
