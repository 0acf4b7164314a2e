package ai.onnxruntime;

import java.nio.ByteBuffer;

public class OnnxTensor extends OnnxTensorLike {
  public static native OnnxTensor createTensor(OrtEnvironment env, ByteBuffer data, long[] shape, OnnxJavaType type)
      throws OrtException;

  public native ByteBuffer getByteBuffer();

  @Override
  public native void close();

  @Override
  public native TensorInfo getInfo();
}
