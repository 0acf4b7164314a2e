package edgekit.loader;

/** A bundle is damaged, or cannot be opened on this device; the message says which and why. */
public final class LoaderException extends Exception {
  private static final long serialVersionUID = 1L;

  public LoaderException(String message) {
    super(message);
  }

  public LoaderException(String message, Throwable cause) {
    super(message, cause);
  }
}
