package ai.onnxruntime;

import ai.onnxruntime.providers.NNAPIFlags;
import java.util.EnumSet;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.Set;

public class OrtSession implements AutoCloseable {
  public native Result run(Map<String, ? extends OnnxTensorLike> inputs, Set<String> outputs) throws OrtException;

  @Override
  public native void close() throws OrtException;

  public static class Result implements AutoCloseable, Iterable<Map.Entry<String, OnnxValue>> {
    @Override
    public native Iterator<Map.Entry<String, OnnxValue>> iterator();

    @Override
    public native void close();
  }

  public static class SessionOptions implements AutoCloseable {
    public native void setIntraOpNumThreads(int threads) throws OrtException;

    public native void addConfigEntry(String key, String value) throws OrtException;

    public native void addXnnpack(Map<String, String> options) throws OrtException;

    public native void addNnapi(EnumSet<NNAPIFlags> flags) throws OrtException;

    public native void addExecutionProvider(List<OrtEpDevice> devices, Map<String, String> options) throws OrtException;

    @Override
    public native void close();
  }
}
