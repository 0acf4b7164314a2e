package edgekit.loader;

import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OnnxValue;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import java.io.ByteArrayOutputStream;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.Map;

/** A tensor: the type and shape of its numbers, and their bytes in the machine's order, the last axis first. */
public final class Array {
  public final String dtype;
  final long[] shape;
  final byte[] bytes;

  /**
   * Makes an array of any type.
   *
   * @param dtype numpy's name, such as "float32"
   */
  public Array(String dtype, byte[] bytes, long... shape) {
    this.dtype = dtype;
    this.bytes = bytes;
    this.shape = shape;
  }

  public static Array of(float[] values, long... shape) {
    ByteBuffer buffer = allocate(values.length * 4);
    for (float value : values) buffer.putFloat(value);
    return new Array("float32", buffer.array(), shape);
  }

  public static Array of(long[] values, long... shape) {
    ByteBuffer buffer = allocate(values.length * 8);
    for (long value : values) buffer.putLong(value);
    return new Array("int64", buffer.array(), shape);
  }

  public long[] shape() {
    return shape.clone();
  }

  /** The bytes, to be read as what the type says. */
  public ByteBuffer buffer() {
    return ByteBuffer.wrap(bytes).order(ByteOrder.nativeOrder());
  }

  /** The numbers of a float32 array. */
  public float[] floats() {
    if (!dtype.equals("float32")) throw new IllegalStateException("the array holds " + dtype);
    float[] values = new float[bytes.length / 4];
    buffer().asFloatBuffer().get(values);
    return values;
  }

  /** Returns `count` places on one axis, the first of them `from`; those beyond the end hold `fill`. */
  Array window(int axis, long from, long count, byte[] fill) throws LoaderException {
    int inner = product(axis + 1, shape.length) * SelfTest.Dtype.find(dtype).bytes, outer = product(0, axis);
    long[] made = shape.clone();
    made[axis] = count;
    ByteArrayOutputStream out = new ByteArrayOutputStream();
    for (int row = 0; row < outer; row++) {
      for (long place = from; place < from + count; place++) {
        if (place < shape[axis]) out.write(bytes, (int) (row * shape[axis] + place) * inner, inner);
        else for (int i = 0; i < inner; i += fill.length) out.write(fill, 0, fill.length);
      }
    }
    return new Array(dtype, out.toByteArray(), made);
  }

  /** Returns this array and another one behind it on an axis. */
  Array join(Array next, int axis) throws LoaderException {
    int bytesOfOne = SelfTest.Dtype.find(dtype).bytes, outer = product(0, axis);
    int left = product(axis, shape.length) * bytesOfOne, right = next.product(axis, next.shape.length) * bytesOfOne;
    long[] made = shape.clone();
    made[axis] += next.shape[axis];
    ByteArrayOutputStream out = new ByteArrayOutputStream();
    for (int row = 0; row < outer; row++) {
      out.write(bytes, row * left, left);
      out.write(next.bytes, row * right, right);
    }
    return new Array(dtype, out.toByteArray(), made);
  }

  /** Throws unless this can be an input: of its type, with as many axes and bytes as belong to them. */
  void check(Bundle.Tensor tensor) throws LoaderException {
    int wanted = product(0, shape.length) * SelfTest.Dtype.find(dtype).bytes;
    if (!dtype.equals(tensor.dtype) || shape.length != tensor.shape.length || bytes.length != wanted) {
      String axes = tensor.dtype + " of " + tensor.shape.length + " axes";
      throw new LoaderException("input '" + tensor.name + "' is no " + axes);
    }
  }

  /** Returns what a session makes of arrays: the outputs of fixed shape that the bundle names. */
  static Map<String, Array> run(OrtSession session, Bundle bundle, Map<String, Array> inputs) throws LoaderException {
    Map<String, OnnxTensor> fed = new HashMap<>();
    Map<String, Bundle.Tensor> wanted = new LinkedHashMap<>();
    for (Bundle.Tensor tensor : bundle.outputs) wanted.put(tensor.name, tensor);
    try {
      for (Bundle.Tensor tensor : bundle.inputs) fed.put(tensor.name, find(inputs, tensor).feed());
      Map<String, Array> outputs = new LinkedHashMap<>();
      try (OrtSession.Result result = session.run(fed, wanted.keySet())) {
        for (Map.Entry<String, OnnxValue> entry : result) {
          outputs.put(entry.getKey(), read(wanted.get(entry.getKey()), entry.getValue()));
        }
      }
      return outputs;
    } catch (OrtException error) {
      throw new LoaderException("'" + bundle.name + "' does not run: " + error.getMessage(), error);
    } finally {
      for (OnnxTensor value : fed.values()) value.close();
    }
  }

  static Array find(Map<String, Array> inputs, Bundle.Tensor tensor) throws LoaderException {
    Array array = inputs.get(tensor.name);
    if (array == null) throw new LoaderException("input '" + tensor.name + "' is missing");
    array.check(tensor);
    return array;
  }

  private static Array read(Bundle.Tensor tensor, OnnxValue value) throws LoaderException {
    if (!(value instanceof OnnxTensor)) throw new LoaderException("output '" + tensor.name + "' is no tensor");
    OnnxTensor found = (OnnxTensor) value;
    if (found.getInfo().type != SelfTest.Dtype.find(tensor.dtype).type) {
      throw new LoaderException("output '" + tensor.name + "' has another type than the bundle says");
    }
    ByteBuffer buffer = found.getByteBuffer();
    byte[] bytes = new byte[buffer.remaining()];
    buffer.get(bytes);
    return new Array(tensor.dtype, bytes, found.getInfo().getShape());
  }

  private OnnxTensor feed() throws OrtException, LoaderException {
    ByteBuffer buffer = ByteBuffer.allocateDirect(bytes.length).order(ByteOrder.nativeOrder());
    buffer.put(bytes).rewind();
    return OnnxTensor.createTensor(OrtEnvironment.getEnvironment(), buffer, shape, SelfTest.Dtype.find(dtype).type);
  }

  private int product(int from, int to) {
    long product = 1;
    for (int axis = from; axis < to; axis++) product *= shape[axis];
    return Math.toIntExact(product);
  }

  private static ByteBuffer allocate(int bytes) {
    return ByteBuffer.allocate(bytes).order(ByteOrder.nativeOrder());
  }
}
