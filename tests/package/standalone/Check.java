package edgekit.loader;

import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtSession;
import java.io.File;
import java.io.FileInputStream;
import java.util.Arrays;
import java.util.List;
import java.util.Map;

/**
 * Runs the loader on a desktop: {@code Check BUNDLES WORK open|keys NAME [--cpu] [--plugin LIBRARY]}.
 *
 * <p>{@code open} opens a bundle ("-": the first that opens) and tests it; {@code keys} asks besides if each session
 * key is passed on, and if the self-test can say no; {@code older} opens it as if it needed a newer ONNX Runtime.
 */
public final class Check {
  private Check() {}

  public static void main(String[] arguments) throws Exception {
    File bundles = new File(arguments[0]);
    Loader loader = new Loader(name -> new FileInputStream(new File(bundles, name)), new File(arguments[1]));
    List<String> options = Arrays.asList(arguments);
    if (options.contains("--cpu")) loader = loader.onCpu();
    if (options.contains("--plugin")) loader = loader.withPlugin(options.get(options.indexOf("--plugin") + 1));
    try {
      if (arguments[2].equals("older")) loader.open(change(find(arguments[3]), "1.1000.0"));
      else if (arguments[2].equals("keys")) checkKeys(loader, find(arguments[3]));
      else System.exit(open(loader, arguments[3]) ? 0 : 1);
    } catch (LoaderException error) {
      System.out.println("not opened: " + error.getMessage());
      System.exit(1);
    }
  }

  private static boolean open(Loader loader, String name) throws Exception {
    if (!name.equals("-")) {
      Bundle bundle = find(name);
      try (OrtSession session = loader.open(bundle)) {
        return report(bundle, loader.runSelfTest(session, bundle));
      }
    }
    try (Loader.Opened opened = loader.openFirst()) {
      for (String refusal : opened.refusals) System.out.println("not opened: " + refusal);
      return report(opened.bundle, loader.runSelfTest(opened.session, opened.bundle));
    }
  }

  /** Threads of the process, of which the Java machine knows only its own. */
  private static int countThreads() {
    return new File("/proc/self/task").list().length;
  }

  private static boolean report(Bundle bundle, List<String> failures) {
    for (String failure : failures) System.out.println(bundle.name + ": " + failure);
    if (failures.isEmpty()) System.out.println(bundle.name + ": self-test passed with " + bundle.samples + " samples");
    return failures.isEmpty();
  }

  private static void checkKeys(Loader loader, Bundle bundle) throws Exception {
    for (String key : bundle.sessionConfig.keySet()) {
      String[] entries = flat(bundle.sessionConfig);
      entries[Arrays.asList(entries).indexOf(key) + 1] = new String(new char[100000]).replace('\0', 'x');
      try {
        loader.open(change(bundle, entries, bundle.minSqnrDb)).close();
      } catch (LoaderException error) {
        System.out.println("refused: " + key);
      }
    }
    checkTuned(loader, bundle);
    OrtEnvironment.getEnvironment(); // has a thread of its own
    int before = countThreads();
    try (OrtSession session = loader.open(bundle)) {
      System.out.println("threads: " + (countThreads() - before));
      report(bundle, loader.runSelfTest(session, bundle));
      System.out.println(loader.runSelfTest(session, change(bundle, flat(bundle.sessionConfig), 199)));
    }
    for (Map.Entry<String, String> entry : bundle.providerOptions.entrySet()) {
      System.out.println("option: " + entry.getKey() + "=" + entry.getValue());
    }
  }

  private static Bundle change(Bundle bundle, String minimumOrt) {
    return change(bundle, minimumOrt, flat(bundle.sessionConfig), bundle.minSqnrDb);
  }

  private static Bundle change(Bundle bundle, String[] sessionConfig, double minSqnrDb) {
    return change(bundle, bundle.minimumOrt, sessionConfig, minSqnrDb);
  }

  private static Bundle change(Bundle bundle, String minimumOrt, String[] sessionConfig, double minSqnrDb) {
    String[] names = {bundle.name, bundle.provider, minimumOrt, bundle.model, bundle.golden, bundle.judgedByFloat ? "outputs" : "expected"};
    double[] limits = {bundle.minCosine, minSqnrDb, bundle.minTop1Agreement, bundle.grantedSamples};
    String[] options = flat(bundle.providerOptions), files = flat(bundle.files);
    Object[] tolerance = {bundle.outputs[0].name, -1.0};
    return new Bundle(
        names, options, sessionConfig, files, bundle.inputs, bundle.outputs, bundle.samples, bundle.chosen, tolerance,
        bundle.tuned, bundle.runs, limits);
  }

  /** A bundle that was tuned for a kind of machine to a session key that no session takes. */
  private static Bundle tune(Bundle bundle, String machine) {
    String[] config = {"session.intra_op.allow_spinning", new String(new char[100000]).replace('\0', 'x')};
    int cores = Runtime.getRuntime().availableProcessors();
    Bundle.Tuned[] tuned = {
      new Bundle.Tuned(
          new String[] {"linux", machine, "BASIC_OPT"},
          new int[] {cores, 1, 0},
          new boolean[] {false, true, true},
          flat(bundle.providerOptions),
          config)
    };
    String[] names = {bundle.name, bundle.provider, bundle.minimumOrt, bundle.model, bundle.golden, "outputs"};
    return new Bundle(
        names, flat(bundle.providerOptions), flat(bundle.sessionConfig), flat(bundle.files), bundle.inputs,
        bundle.outputs, bundle.samples, bundle.chosen, new Object[] {}, tuned, bundle.runs, 0, 0, 0, 0);
  }

  private static void checkTuned(Loader loader, Bundle bundle) throws Exception {
    String here = System.getProperty("os.arch").replace("amd64", "x86_64");
    loader.open(tune(bundle, "other")).close();
    loader.untuned().open(tune(bundle, here)).close();
    System.out.println("tuned elsewhere: opened");
    try {
      loader.open(tune(bundle, here)).close();
    } catch (LoaderException error) {
      System.out.println("tuned here: refused");
    }
  }

  private static String[] flat(Map<String, String> map) {
    return map.entrySet().stream()
        .flatMap(entry -> java.util.stream.Stream.of(entry.getKey(), entry.getValue()))
        .toArray(String[]::new);
  }

  private static Bundle find(String name) {
    return Bundles.ALL.stream().filter(bundle -> bundle.name.equals(name)).findFirst().get();
  }
}
