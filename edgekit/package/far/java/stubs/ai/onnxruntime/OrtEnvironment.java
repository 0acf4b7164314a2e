package ai.onnxruntime;

import java.util.List;

public final class OrtEnvironment {
  public static native OrtEnvironment getEnvironment();

  public native String getVersion();

  public native void registerExecutionProviderLibrary(String name, String library) throws OrtException;

  public native List<OrtEpDevice> getEpDevices() throws OrtException;

  public native OrtSession createSession(String path, OrtSession.SessionOptions options) throws OrtException;
}
