package ai.onnxruntime;

public enum OnnxJavaType {
  FLOAT,
  DOUBLE,
  INT8,
  INT16,
  INT32,
  INT64,
  BOOL,
  UINT8,
  FLOAT16
}
