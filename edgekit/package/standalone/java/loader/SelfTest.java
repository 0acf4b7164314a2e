package edgekit.loader;

import ai.onnxruntime.OnnxJavaType;
import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OnnxValue;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.zip.ZipEntry;
import java.util.zip.ZipInputStream;

/** Compares what a session makes of the golden samples with what the float model made of them. */
final class SelfTest {
  private static final double DB_LIMIT = 200;

  private final Bundle.Tensor tensor;
  private final Dtype dtype;
  private double samples;
  private double elements;
  private double matches;
  private double faulty;
  private double dot;
  private double wanted;
  private double got;
  private double error;
  private double ranked;
  private double agreed;

  private SelfTest(Bundle.Tensor tensor) throws LoaderException {
    this.tensor = tensor;
    this.dtype = Dtype.find(tensor.dtype);
  }

  static List<String> run(OrtSession session, Bundle bundle, Source source)
      throws OrtException, IOException, LoaderException {
    Map<String, byte[]> inputs = read(source, bundle, bundle.golden + "/inputs.npz", bundle.inputs, bundle.samples);
    int chosen = bundle.chosen.length;
    boolean whole = bundle.judgedByFloat;
    String own = "golden/expected.npz", all = bundle.golden + "/outputs.npz";
    Map<String, byte[]> expected = chosen == 0 ? null : read(source, bundle, own, bundle.outputs, chosen);
    Map<String, byte[]> outputs = whole ? read(source, bundle, all, bundle.outputs, bundle.samples) : expected;
    List<String> failures = new ArrayList<>();
    Map<String, SelfTest> sums = new LinkedHashMap<>();
    for (Bundle.Tensor tensor : bundle.outputs) sums.put(tensor.name, new SelfTest(tensor));
    for (int index = 0; index < bundle.samples; index++) {
      int place = bundle.findChosen(index);
      if (!whole && place < 0) continue; // a sample of another bundle's self-test
      Map<String, OnnxTensor> fed = new HashMap<>();
      try {
        for (Bundle.Tensor tensor : bundle.inputs) fed.put(tensor.name, feed(tensor, inputs.get(tensor.name), index));
        try (OrtSession.Result result = session.run(fed, sums.keySet())) {
          for (Map.Entry<String, OnnxValue> entry : result) {
            SelfTest sum = sums.get(entry.getKey());
            ByteBuffer found = sum.open(entry.getValue());
            sum.add(outputs.get(entry.getKey()), found, whole ? index : place);
            if (place >= 0) sum.compare(expected.get(entry.getKey()), place, found, bundle, failures);
          }
        }
      } finally {
        for (OnnxTensor value : fed.values()) value.close();
      }
    }
    for (SelfTest sum : sums.values()) sum.judge(bundle, failures);
    return failures;
  }

  private static OnnxTensor feed(Bundle.Tensor tensor, byte[] rows, int index) throws OrtException, LoaderException {
    Dtype dtype = Dtype.find(tensor.dtype);
    int bytes = tensor.count() * dtype.bytes;
    ByteBuffer buffer = ByteBuffer.allocateDirect(bytes).order(ByteOrder.nativeOrder());
    buffer.put(rows, index * bytes, bytes).rewind();
    return OnnxTensor.createTensor(OrtEnvironment.getEnvironment(), buffer, tensor.shape, dtype.type);
  }

  private ByteBuffer open(OnnxValue value) throws LoaderException {
    if (!(value instanceof OnnxTensor)) throw new LoaderException("output '" + tensor.name + "' is no tensor");
    ByteBuffer found = ((OnnxTensor) value).getByteBuffer().order(ByteOrder.nativeOrder());
    if (((OnnxTensor) value).getInfo().type != dtype.type || found.remaining() != tensor.count() * dtype.bytes) {
      throw new LoaderException("output '" + tensor.name + "' has another type or size than the bundle says");
    }
    return found;
  }

  /** Compares one sample with what this very model gave where it was built. */
  private void compare(byte[] rows, int place, ByteBuffer found, Bundle bundle, List<String> failures) {
    Double limit = bundle.tolerance.get(tensor.name);
    if (limit == null || !dtype.numeric) return;
    ByteBuffer expected = ByteBuffer.wrap(rows).order(ByteOrder.LITTLE_ENDIAN);
    int count = tensor.count();
    double distance = 0;
    for (int i = 0; i < count; i++) {
      double should = dtype.read(expected, (place * count + i) * dtype.bytes);
      distance = Math.max(distance, Math.abs(should - dtype.read(found, i * dtype.bytes)));
    }
    if (!(distance <= limit)) {
      failures.add("output '" + tensor.name + "' is off by " + distance + ", at most " + limit);
    }
  }

  private void add(byte[] rows, ByteBuffer found, int index) {
    int count = tensor.count();
    ByteBuffer expected = ByteBuffer.wrap(rows).order(ByteOrder.LITTLE_ENDIAN);
    double best = Double.NEGATIVE_INFINITY, top = Double.NEGATIVE_INFINITY, topWanted = Double.NEGATIVE_INFINITY;
    samples += 1;
    elements += count;
    for (int i = 0; i < count; i++) {
      int at = (index * count + i) * dtype.bytes;
      double want = dtype.read(expected, at), have = dtype.read(found, i * dtype.bytes);
      if (dtype.bits(expected, at) == dtype.bits(found, i * dtype.bytes)) matches += 1;
      if (!dtype.numeric) continue;
      if (Double.isNaN(want) || Double.isInfinite(want) || Double.isNaN(have) || Double.isInfinite(have)) faulty += 1;
      dot += want * have;
      wanted += want * want;
      got += have * have;
      error += (have - want) * (have - want);
      best = Math.max(best, want);
      if (have > top) {
        top = have;
        topWanted = want;
      }
    }
    boolean ranks = false;
    for (long dim : tensor.shape) ranks |= dim == count;
    if (!ranks || count < 2 || !dtype.numeric) return;
    ranked += 1;
    if (topWanted >= best) agreed += 1;
  }

  private void judge(Bundle bundle, List<String> failures) {
    if (elements == 0 || faulty > 0) {
      failures.add("output '" + tensor.name + "' has " + (long) faulty + " values that are NaN or infinite");
      return;
    }
    if (!dtype.numeric) {
      expect(failures, "exact match", matches / elements, bundle.minTop1Agreement);
      return;
    }
    double norm = Math.sqrt(wanted) * Math.sqrt(got);
    expect(failures, "cosine", norm > 0 ? dot / norm : wanted == got ? 1 : 0, bundle.minCosine);
    expect(failures, "SQNR in dB", decibels(wanted, error), bundle.minSqnrDb);
    if (ranked > 0) {
      expect(failures, "top-1 agreement", agreed / ranked, bundle.minTop1Agreement - bundle.grantedSamples / samples);
    }
  }

  private void expect(List<String> failures, String what, double value, double least) {
    if (value >= least) return;
    failures.add(String.format(Locale.ROOT, "output '%s': %s %.4f, least %.4f", tensor.name, what, value, least));
  }

  private static double decibels(double signal, double noise) {
    if (noise <= 0) return DB_LIMIT;
    return signal <= 0 ? -DB_LIMIT : Math.max(-DB_LIMIT, Math.min(DB_LIMIT, 10 * Math.log10(signal / noise)));
  }

  /** Reads the rows of each tensor from an .npz, which is a zip of .npy files. */
  private static Map<String, byte[]> read(
      Source source, Bundle bundle, String file, Bundle.Tensor[] tensors, int count)
      throws IOException, LoaderException {
    Map<String, byte[]> files = new HashMap<>();
    try (InputStream stream = source.open(bundle.place(file));
        ZipInputStream archive = new ZipInputStream(stream)) {
      for (ZipEntry entry = archive.getNextEntry(); entry != null; entry = archive.getNextEntry()) {
        ByteArrayOutputStream content = new ByteArrayOutputStream();
        byte[] buffer = new byte[1 << 16];
        for (int read = archive.read(buffer); read >= 0; read = archive.read(buffer)) content.write(buffer, 0, read);
        files.put(entry.getName(), content.toByteArray());
      }
    }
    Map<String, byte[]> rows = new HashMap<>();
    for (Bundle.Tensor tensor : tensors) rows.put(tensor.name, strip(files.get(tensor.name + ".npy"), tensor, count));
    return rows;
  }

  private static byte[] strip(byte[] file, Bundle.Tensor tensor, int count) throws LoaderException {
    Dtype dtype = Dtype.find(tensor.dtype);
    int header = file == null || file.length < 10 ? -1 : 10 + (file[8] & 255) + ((file[9] & 255) << 8);
    long size = (long) count * tensor.count() * dtype.bytes;
    if (header < 0 || file.length - header != size || !new String(file, 0, header, LATIN).contains(dtype.numpy)) {
      throw new LoaderException("the golden samples of '" + tensor.name + "' are not " + count + " rows");
    }
    byte[] rows = new byte[(int) size];
    System.arraycopy(file, header, rows, 0, rows.length);
    return rows;
  }

  private static final java.nio.charset.Charset LATIN = java.nio.charset.StandardCharsets.ISO_8859_1;

  /** An element type: its name in numpy, its size, and if distances between its values mean something. */
  static final class Dtype {
    final OnnxJavaType type;
    final String numpy;
    final int bytes;
    final boolean numeric;

    private Dtype(OnnxJavaType type, String numpy, int bytes, boolean numeric) {
      this.type = type;
      this.numpy = numpy;
      this.bytes = bytes;
      this.numeric = numeric;
    }

    static Dtype find(String name) throws LoaderException {
      switch (name) {
        case "float32":
          return new Dtype(OnnxJavaType.FLOAT, "<f4", 4, true);
        case "float64":
          return new Dtype(OnnxJavaType.DOUBLE, "<f8", 8, true);
        case "float16":
          return new Dtype(OnnxJavaType.FLOAT16, "<f2", 2, true);
        case "int8":
          return new Dtype(OnnxJavaType.INT8, "|i1", 1, true);
        case "uint8":
          return new Dtype(OnnxJavaType.UINT8, "|u1", 1, true);
        case "int16":
          return new Dtype(OnnxJavaType.INT16, "<i2", 2, true);
        case "int32":
          return new Dtype(OnnxJavaType.INT32, "<i4", 4, false);
        case "int64":
          return new Dtype(OnnxJavaType.INT64, "<i8", 8, false);
        case "bool":
          return new Dtype(OnnxJavaType.BOOL, "|b1", 1, false);
        default:
          throw new LoaderException("tensors of " + name + " have no self-test in Java");
      }
    }

    double read(ByteBuffer buffer, int at) {
      switch (numpy) {
        case "<f4":
          return buffer.getFloat(at);
        case "<f8":
          return buffer.getDouble(at);
        case "<f2":
          return half(buffer.getShort(at));
        case "|u1":
          return buffer.get(at) & 255;
        default:
          return bits(buffer, at);
      }
    }

    long bits(ByteBuffer buffer, int at) {
      return bytes == 1 ? buffer.get(at) : bytes == 2 ? buffer.getShort(at) : bytes == 4 ? buffer.getInt(at) : buffer.getLong(at);
    }

    private static double half(short bits) {
      int exponent = bits >> 10 & 31, fraction = bits & 1023;
      double size = exponent == 0 ? Math.scalb((double) fraction, -24) : Math.scalb(1024.0 + fraction, exponent - 25);
      if (exponent == 31) size = fraction == 0 ? Double.POSITIVE_INFINITY : Double.NaN;
      return bits < 0 ? -size : size;
    }
  }
}
