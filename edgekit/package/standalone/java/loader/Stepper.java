package edgekit.loader;

import ai.onnxruntime.OrtSession;
import java.util.HashMap;
import java.util.Map;

/**
 * Runs a model with state, as a KV cache, step by step: what a step gives of it goes into the next.
 *
 * <p>An output that is longer than the input it feeds gives its last rows; one that is shorter is appended to the
 * input, whose oldest rows go.
 */
public final class Stepper {
  private final OrtSession session;
  private final Bundle bundle;
  private final Map<String, Array> state = new HashMap<>();

  public Stepper(OrtSession session, Bundle bundle) throws LoaderException {
    this.session = session;
    this.bundle = bundle;
    reset(new HashMap<>());
  }

  /** Begins a sequence, with zeros where `given` has no array for an input. */
  public void reset(Map<String, Array> given) throws LoaderException {
    state.clear();
    for (String name : bundle.runs.feeds.keySet()) {
      Bundle.Tensor tensor = find(name);
      int bytes = tensor.count() * SelfTest.Dtype.find(tensor.dtype).bytes;
      state.put(name, new Array(tensor.dtype, new byte[bytes], tensor.shape));
    }
    state.putAll(given);
  }

  /** Returns the outputs of the next step; `inputs` are those that hold no state. */
  public Map<String, Array> run(Map<String, Array> inputs) throws LoaderException {
    Map<String, Array> given = new HashMap<>(state);
    given.putAll(inputs);
    Map<String, Array> outputs = Array.run(session, bundle, given);
    for (Map.Entry<String, String> feed : bundle.runs.feeds.entrySet()) {
      Array made = outputs.get(feed.getValue());
      if (made == null) {
        throw new LoaderException("output '" + feed.getValue() + "' has no fixed shape, and cannot be fed back");
      }
      state.put(feed.getKey(), feedBack(find(feed.getKey()), state.get(feed.getKey()), made));
    }
    return outputs;
  }

  private Bundle.Tensor find(String name) throws LoaderException {
    for (Bundle.Tensor tensor : bundle.inputs) {
      if (tensor.name.equals(name)) return tensor;
    }
    throw new LoaderException("there is no input '" + name + "'");
  }

  private static Array feedBack(Bundle.Tensor input, Array held, Array made) throws LoaderException {
    for (int axis = 0; axis < input.shape.length; axis++) {
      long size = input.shape[axis];
      if (made.shape[axis] < size) made = held.join(made, axis);
      if (made.shape[axis] > size) made = made.window(axis, made.shape[axis] - size, size, new byte[0]);
    }
    return made;
  }
}
