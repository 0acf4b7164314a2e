package ai.onnxruntime;

public class TensorInfo {
  public final OnnxJavaType type;

  TensorInfo(OnnxJavaType type) {
    this.type = type;
  }
}
