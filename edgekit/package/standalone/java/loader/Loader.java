package edgekit.loader;

import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtEpDevice;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import ai.onnxruntime.providers.NNAPIFlags;
import java.io.File;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.ArrayList;
import java.util.EnumSet;
import java.util.List;
import java.util.Map;

/**
 * Opens bundles with ONNX Runtime: checks every file, then sets every session key and provider option of the manifest.
 *
 * <p>Nothing falls back to the CPU in silence: {@link #onCpu} must be asked for.
 */
public final class Loader {
  private static final String NO_CPU = "session.disable_cpu_ep_fallback";
  private static final String QNN = "QNNExecutionProvider";

  private final Source source;
  private final File folder;
  private final String plugin;
  private final boolean cpu;
  private final boolean tunes;

  /**
   * Makes a loader.
   *
   * @param source where the bundles are
   * @param folder where model files are unpacked to, such as {@code Context.getFilesDir()}
   */
  public Loader(Source source, File folder) {
    this(source, folder, "", false, true);
  }

  private Loader(Source source, File folder, String plugin, boolean cpu, boolean tunes) {
    this.source = source;
    this.folder = folder;
    this.plugin = plugin;
    this.cpu = cpu;
    this.tunes = tunes;
  }

  /** Returns a loader that leaves the provider out, and the key that forbids the CPU with it. */
  public Loader onCpu() {
    return new Loader(source, folder, plugin, true, tunes);
  }

  /** Returns a loader that knows the library of a provider which is loaded at run time, such as QNN's. */
  public Loader withPlugin(String library) {
    return new Loader(source, folder, library, cpu, tunes);
  }

  /** Returns a loader that leaves out what {@code edgekit tune} found for devices like this one. */
  public Loader untuned() {
    return new Loader(source, folder, plugin, cpu, false);
  }

  /** A session with the bundle that it came from, and why the bundles before it could not be opened. */
  public static final class Opened implements AutoCloseable {
    public final OrtSession session;
    public final Bundle bundle;
    public final List<String> refusals;

    Opened(OrtSession session, Bundle bundle, List<String> refusals) {
      this.session = session;
      this.bundle = bundle;
      this.refusals = refusals;
    }

    @Override
    public void close() throws OrtException {
      session.close();
    }
  }

  /** Opens the first bundle that this device can run, in the order of {@link Bundles#ALL}. */
  public Opened openFirst() throws LoaderException {
    List<String> refusals = new ArrayList<>();
    for (Bundle bundle : Bundles.ALL) {
      try {
        return new Opened(open(bundle), bundle, refusals);
      } catch (LoaderException error) {
        refusals.add(bundle.name + ": " + error.getMessage());
      }
    }
    throw new LoaderException("no bundle can be opened here: " + refusals);
  }

  /** Opens one bundle. */
  public OrtSession open(Bundle bundle) throws LoaderException {
    return open(bundle, bundle.model);
  }

  /** Opens the model of one size of a bundle with several. */
  OrtSession open(Bundle bundle, String file) throws LoaderException {
    OrtEnvironment environment = OrtEnvironment.getEnvironment();
    if (isOlder(environment.getVersion(), bundle.minimumOrt)) {
      String has = environment.getVersion();
      throw new LoaderException("'" + bundle.name + "' needs ONNX Runtime " + bundle.minimumOrt + ", this is " + has);
    }
    checkFiles(bundle);
    File model = new File(unpack(bundle), file);
    try (OrtSession.SessionOptions options = new OrtSession.SessionOptions()) {
      // What was measured was the largest size.
      Bundle.Tuned tuned = cpu || !tunes || !file.equals(bundle.model) ? null : bundle.findTuned();
      Map<String, String> config = tuned == null ? bundle.sessionConfig : tuned.sessionConfig;
      for (Map.Entry<String, String> entry : config.entrySet()) {
        if (!cpu || !entry.getKey().equals(NO_CPU)) options.addConfigEntry(entry.getKey(), entry.getValue());
      }
      addProvider(environment, options, bundle, tuned == null ? bundle.providerOptions : tuned.providerOptions);
      if (tuned != null) apply(tuned, options);
      return environment.createSession(model.getPath(), options);
    } catch (OrtException | IllegalArgumentException error) {
      throw new LoaderException("'" + bundle.name + "' cannot be opened here: " + error.getMessage(), error);
    }
  }

  /** Throws if a file of the bundle is missing or has another sha256 than it was packed with. */
  public void checkFiles(Bundle bundle) throws LoaderException {
    for (String name : bundle.files.keySet()) {
      try (InputStream stream = source.open(bundle.place(name))) {
        copy(stream, null, bundle, name);
      } catch (IOException error) {
        throw new LoaderException("'" + name + "' of bundle '" + bundle.name + "' cannot be read: " + error, error);
      }
    }
  }

  /**
   * Runs the golden samples of a bundle.
   *
   * @return every reason why the outputs do not reach the bundle's thresholds; none is a pass
   */
  public List<String> runSelfTest(OrtSession session, Bundle bundle) throws LoaderException {
    try {
      return SelfTest.run(session, bundle, source);
    } catch (OrtException | IOException error) {
      throw new LoaderException("the self-test of '" + bundle.name + "' ended: " + error.getMessage(), error);
    }
  }

  private static void apply(Bundle.Tuned tuned, OrtSession.SessionOptions options) throws OrtException {
    options.setOptimizationLevel(OrtSession.SessionOptions.OptLevel.valueOf(tuned.level));
    // Where no number was chosen, that which the provider wants stays.
    if (tuned.threads != 0) options.setIntraOpNumThreads(tuned.threads);
    options.setInterOpNumThreads(tuned.interThreads);
    if (tuned.parallel) options.setExecutionMode(OrtSession.SessionOptions.ExecutionMode.PARALLEL);
    options.setCPUArenaAllocator(tuned.arena);
    options.setMemoryPatternOptimization(tuned.memoryPattern);
  }

  private void addProvider(
      OrtEnvironment environment, OrtSession.SessionOptions options, Bundle bundle, Map<String, String> given)
      throws OrtException, LoaderException {
    if (cpu || bundle.provider.equals("CPUExecutionProvider")) return;
    switch (bundle.provider) {
      case "XnnpackExecutionProvider":
        options.setIntraOpNumThreads(1); // XNNPACK has its own threads
        options.addXnnpack(given);
        return;
      case "NnapiExecutionProvider":
        EnumSet<NNAPIFlags> flags = EnumSet.noneOf(NNAPIFlags.class);
        for (Map.Entry<String, String> entry : given.entrySet()) {
          // The manifest has the names of nnapi_provider_factory.h, which Java leaves the beginning of.
          String name = entry.getKey().replaceFirst("^NNAPI_FLAG_", "");
          if (!entry.getValue().equals("0")) flags.add(NNAPIFlags.valueOf(name));
        }
        options.addNnapi(flags);
        return;
      case QNN:
        options.addExecutionProvider(findDevices(environment).subList(0, 1), given);
        return;
      default:
        throw new LoaderException("this loader does not know " + bundle.provider);
    }
  }

  private List<OrtEpDevice> findDevices(OrtEnvironment environment) throws OrtException, LoaderException {
    List<OrtEpDevice> found = listDevices(environment);
    if (found.isEmpty()) {
      if (plugin.isEmpty()) throw new LoaderException("give the library of " + QNN + ": withPlugin");
      environment.registerExecutionProviderLibrary(QNN, plugin);
      found = listDevices(environment);
    }
    if (found.isEmpty()) throw new LoaderException("this device has no NPU that " + QNN + " can use");
    return found;
  }

  private static List<OrtEpDevice> listDevices(OrtEnvironment environment) throws OrtException {
    List<OrtEpDevice> found = new ArrayList<>();
    for (OrtEpDevice device : environment.getEpDevices()) {
      if (device.getEpName().equals(QNN)) found.add(device);
    }
    return found;
  }

  /** Writes the model files into a folder that bears the manifest's digest, and returns it. */
  private File unpack(Bundle bundle) throws LoaderException {
    File place = new File(folder, bundle.name + "-" + bundle.files.get("manifest.json"));
    for (String name : bundle.files.keySet()) {
      if (name.contains("/") || name.endsWith(".json")) continue;
      File file = new File(place, name);
      try {
        if (!isWhole(file, bundle, name)) write(file, bundle, name);
      } catch (IOException error) {
        throw new LoaderException("cannot write '" + file + "': " + error.getMessage(), error);
      }
    }
    return place;
  }

  private boolean isWhole(File file, Bundle bundle, String name) throws IOException {
    if (!file.isFile()) return false;
    try (InputStream stream = new FileInputStream(file)) {
      copy(stream, null, bundle, name);
      return true;
    } catch (LoaderException altered) {
      return false;
    }
  }

  private void write(File file, Bundle bundle, String name) throws IOException, LoaderException {
    File part = new File(file.getPath() + ".part");
    if (!file.getParentFile().isDirectory() && !file.getParentFile().mkdirs()) throw new IOException("no folder");
    try (InputStream stream = source.open(bundle.place(name));
        OutputStream out = new FileOutputStream(part)) {
      copy(stream, out, bundle, name);
    }
    if (!part.renameTo(file)) throw new IOException("it cannot be renamed");
  }

  private static void copy(InputStream stream, OutputStream out, Bundle bundle, String name)
      throws IOException, LoaderException {
    MessageDigest digest;
    try {
      digest = MessageDigest.getInstance("SHA-256");
    } catch (NoSuchAlgorithmException error) {
      throw new LoaderException("this device has no SHA-256", error);
    }
    byte[] buffer = new byte[1 << 16];
    for (int read = stream.read(buffer); read >= 0; read = stream.read(buffer)) {
      digest.update(buffer, 0, read);
      if (out != null) out.write(buffer, 0, read);
    }
    StringBuilder hex = new StringBuilder();
    for (byte value : digest.digest()) {
      hex.append(Character.forDigit(value >> 4 & 15, 16)).append(Character.forDigit(value & 15, 16));
    }
    if (!hex.toString().equals(bundle.files.get(name))) {
      throw new LoaderException("'" + name + "' of bundle '" + bundle.name + "' was altered: its sha256 is another");
    }
  }

  private static boolean isOlder(String version, String least) {
    String[] have = version.split("[.+-]"), need = least.split("[.+-]");
    for (int i = 0; i < 3; i++) {
      int difference = number(have, i) - number(need, i);
      if (difference != 0) return difference < 0;
    }
    return false;
  }

  private static int number(String[] parts, int place) {
    return place < parts.length && parts[place].matches("[0-9]{1,6}") ? Integer.parseInt(parts[place]) : 0;
  }
}
