package edgekit.loader;

import ai.onnxruntime.OrtSession;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.Locale;
import java.util.Map;

/** What the loader must know of a bundle. {@link Bundles}, which is made from the manifests, holds one for each. */
public final class Bundle {
  /** A model input or output; the shape is that of one sample. */
  public static final class Tensor {
    public final String name;
    public final String dtype;
    final long[] shape;

    Tensor(String name, String dtype, long... shape) {
      this.name = name;
      this.dtype = dtype;
      this.shape = shape;
    }

    public long[] shape() {
      return shape.clone();
    }

    int count() {
      long count = 1;
      for (long dim : shape) count *= dim;
      return Math.toIntExact(count);
    }
  }

  /** What a session is told on devices of a kind, as {@code edgekit tune} found it; the bundle's own words are in it. */
  public static final class Tuned {
    final String system;
    final String machine;
    final int cores;
    final String level;
    final int threads;
    final int interThreads;
    final boolean parallel;
    final boolean arena;
    final boolean memoryPattern;
    final Map<String, String> providerOptions;
    final Map<String, String> sessionConfig;

    Tuned(String[] names, int[] numbers, boolean[] flags, String[] providerOptions, String[] sessionConfig) {
      this.system = names[0];
      this.machine = names[1];
      this.level = names[2];
      this.cores = numbers[0];
      this.threads = numbers[1];
      this.interThreads = numbers[2];
      this.parallel = flags[0];
      this.arena = flags[1];
      this.memoryPattern = flags[2];
      this.providerOptions = pairs(providerOptions);
      this.sessionConfig = pairs(sessionConfig);
    }

    boolean holds() {
      boolean android = System.getProperty("java.vendor", "").contains("Android");
      String system = android ? "android" : System.getProperty("os.name", "").toLowerCase(Locale.ROOT);
      String machine = System.getProperty("os.arch", "").replace("amd64", "x86_64");
      boolean counts = cores == 0 || cores == Runtime.getRuntime().availableProcessors();
      return this.system.equals(system) && this.machine.equals(machine) && counts && isKnown();
    }

    /** An older ONNX Runtime lacks a level: half a setting is not what was measured. */
    private boolean isKnown() {
      for (OrtSession.SessionOptions.OptLevel one : OrtSession.SessionOptions.OptLevel.values()) {
        if (one.name().equals(level)) return true;
      }
      return false;
    }
  }

  /** A model of another size: the size, and its file. */
  static final class Bucket {
    final long size;
    final String file;

    Bucket(long size, String file) {
      this.size = size;
      this.file = file;
    }
  }

  /** Axes of a tensor that have the size of a bucket, and the bytes that fill an input there. */
  static final class Filled {
    final String name;
    final int[] axes;
    final byte[] element;

    Filled(String name, int[] axes, byte... element) {
      this.name = name;
      this.axes = axes;
      this.element = element;
    }
  }

  /** How samples run: which outputs feed which inputs of the next step, and the sizes, the smallest first. */
  static final class Runs {
    final Map<String, String> feeds;
    final Bucket[] sizes;
    final Filled[] filled;
    final Filled[] cut;

    Runs(String[] feeds, Bucket[] sizes, Filled[] filled, Filled[] cut) {
      this.feeds = pairs(feeds);
      this.sizes = sizes;
      this.filled = filled;
      this.cut = cut;
    }
  }

  /** The folder of the bundle below the assets. */
  public final String name;

  public final String provider;
  public final String minimumOrt;
  public final Map<String, String> providerOptions;
  public final Map<String, String> sessionConfig;

  final String model;
  final String golden;
  final boolean judgedByFloat;
  final Map<String, String> files;
  final Tensor[] inputs;
  final Tensor[] outputs;
  final int samples;
  final double minCosine;
  final double minSqnrDb;
  final double minTop1Agreement;
  final double grantedSamples;
  final int[] chosen;
  final Map<String, Double> tolerance;
  final Tuned[] tuned;
  final Runs runs;

  Bundle(
      String[] names,
      String[] providerOptions,
      String[] sessionConfig,
      String[] files,
      Tensor[] inputs,
      Tensor[] outputs,
      int samples,
      int[] chosen,
      Object[] tolerance,
      Tuned[] tuned,
      Runs runs,
      double... limits) {
    this.name = names[0];
    this.provider = names[1];
    this.minimumOrt = names[2];
    this.model = names[3];
    this.golden = names[4];
    this.judgedByFloat = names[5].equals("outputs");
    this.providerOptions = pairs(providerOptions);
    this.sessionConfig = pairs(sessionConfig);
    this.files = pairs(files);
    this.inputs = inputs;
    this.outputs = outputs;
    this.samples = samples;
    this.chosen = chosen;
    this.tuned = tuned;
    this.runs = runs;
    this.tolerance = new LinkedHashMap<>();
    for (int i = 0; i < tolerance.length; i += 2) this.tolerance.put((String) tolerance[i], (Double) tolerance[i + 1]);
    this.minCosine = limits[0];
    this.minSqnrDb = limits[1];
    this.minTop1Agreement = limits[2];
    this.grantedSamples = limits[3];
  }

  public Tensor[] inputs() {
    return inputs.clone();
  }

  public Tensor[] outputs() {
    return outputs.clone();
  }

  /** Returns the settings that were found for devices like this one, null where there are none. */
  public Tuned findTuned() {
    for (Tuned one : tuned) {
      if (one.holds()) return one;
    }
    return null;
  }

  /** Returns the row of a sample in expected.npz, -1 where the self-test did not choose it. */
  int findChosen(int sample) {
    for (int place = 0; place < chosen.length; place++) {
      if (chosen[place] == sample) return place;
    }
    return -1;
  }

  /** Where a file lies below the bundles: in this bundle's folder, or beside it where several share it. */
  String place(String file) {
    return file.startsWith("../") ? file.substring(3) : name + "/" + file;
  }

  private static Map<String, String> pairs(String[] texts) {
    Map<String, String> map = new LinkedHashMap<>();
    for (int i = 0; i < texts.length; i += 2) map.put(texts[i], texts[i + 1]);
    return Collections.unmodifiableMap(map);
  }
}
