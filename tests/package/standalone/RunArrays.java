package edgekit.loader;

import ai.onnxruntime.OrtSession;
import java.io.File;
import java.io.FileInputStream;
import java.util.Arrays;
import java.util.HashMap;
import java.util.Map;

/** Runs a bundle with sizes and one with state: {@code RunArrays BUNDLES WORK LENGTH STEPS}. */
public final class RunArrays {
  private RunArrays() {}

  public static void main(String[] arguments) throws Exception {
    File bundles = new File(arguments[0]);
    Loader loader = new Loader(name -> new FileInputStream(new File(bundles, name)), new File(arguments[1]));
    int length = Integer.parseInt(arguments[2]), steps = Integer.parseInt(arguments[3]);
    for (Bundle bundle : Bundles.ALL) {
      try {
        if (bundle.runs.sizes.length > 0) runSizes(loader, bundle, length);
        if (!bundle.runs.feeds.isEmpty()) runSteps(loader, bundle, steps);
      } catch (LoaderException error) {
        System.out.println("refused: " + error.getMessage());
      }
    }
  }

  private static void runSizes(Loader loader, Bundle bundle, int length) throws Exception {
    long[] ids = new long[length];
    float[] mask = new float[length];
    for (int i = 0; i < length; i++) ids[i] = i + 1;
    Arrays.fill(mask, 1);
    Map<String, Array> inputs = new HashMap<>();
    inputs.put("ids", Array.of(ids, 1, length));
    inputs.put("mask", Array.of(mask, 1, length));
    try (Sizes sizes = new Sizes(loader, bundle)) {
      print(sizes.run(inputs));
    }
  }

  private static void runSteps(Loader loader, Bundle bundle, int steps) throws Exception {
    try (OrtSession session = loader.open(bundle)) {
      Stepper stepper = new Stepper(session, bundle);
      for (int step = 0; step < steps; step++) {
        Map<String, Array> inputs = new HashMap<>();
        inputs.put("x", Array.of(new float[] {step, step + 1, step + 2, step + 3}, 1, 4));
        print(stepper.run(inputs));
      }
    }
  }

  private static void print(Map<String, Array> outputs) {
    for (Map.Entry<String, Array> entry : outputs.entrySet()) {
      StringBuilder line = new StringBuilder(entry.getKey());
      for (long dim : entry.getValue().shape()) line.append(' ').append(dim);
      line.append(':');
      for (float value : entry.getValue().floats()) line.append(' ').append(value);
      System.out.println(line);
    }
  }
}
