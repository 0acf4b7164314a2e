package edgekit.loader;

import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import java.util.HashMap;
import java.util.Map;

/**
 * Runs samples of any length with a bundle that has models of several: each in the smallest that takes it.
 *
 * <p>Inputs are filled at their end up to that size, and outputs cut back. A session is opened when it is first needed.
 */
public final class Sizes implements AutoCloseable {
  private final Loader loader;
  private final Bundle bundle;
  private final Map<Long, OrtSession> sessions = new HashMap<>();

  public Sizes(Loader loader, Bundle bundle) {
    this.loader = loader;
    this.bundle = bundle;
  }

  /** Returns the outputs for a sample, as long as it is. */
  public Map<String, Array> run(Map<String, Array> inputs) throws LoaderException {
    for (Bundle.Tensor tensor : bundle.inputs) Array.find(inputs, tensor);
    long length = measure(inputs);
    for (Bundle.Bucket bucket : bundle.runs.sizes) {
      if (length > 0 && bucket.size >= length) return run(bucket, length, inputs);
    }
    throw new LoaderException("'" + bundle.name + "' takes no sample of " + length);
  }

  private long measure(Map<String, Array> inputs) throws LoaderException {
    long length = -1;
    for (Bundle.Filled filled : bundle.runs.filled) {
      for (int axis : filled.axes) {
        long size = inputs.get(filled.name).shape[axis];
        if (length >= 0 && size != length) {
          throw new LoaderException("input '" + filled.name + "' has another length than the others");
        }
        length = size;
      }
    }
    return length;
  }

  private Map<String, Array> run(Bundle.Bucket bucket, long length, Map<String, Array> inputs) throws LoaderException {
    Map<String, Array> given = new HashMap<>(inputs);
    for (Bundle.Filled filled : bundle.runs.filled) {
      for (int axis : filled.axes) {
        given.put(filled.name, given.get(filled.name).window(axis, 0, bucket.size, filled.element));
      }
    }
    Map<String, Array> outputs = Array.run(open(bucket), bundle, given);
    for (Bundle.Filled cut : bundle.runs.cut) {
      for (int axis : cut.axes) {
        Array output = outputs.get(cut.name);
        if (output == null) continue;
        long kept = (length * output.shape[axis] + bucket.size - 1) / bucket.size;
        outputs.put(cut.name, output.window(axis, 0, kept, new byte[0]));
      }
    }
    return outputs;
  }

  private OrtSession open(Bundle.Bucket bucket) throws LoaderException {
    OrtSession session = sessions.get(bucket.size);
    if (session == null) sessions.put(bucket.size, session = loader.open(bundle, bucket.file));
    return session;
  }

  @Override
  public void close() throws OrtException {
    for (OrtSession session : sessions.values()) session.close();
    sessions.clear();
  }
}
