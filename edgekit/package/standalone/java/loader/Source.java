package edgekit.loader;

import java.io.IOException;
import java.io.InputStream;

/** Where the files of the bundles are: the assets of an app, the class path, or a folder. */
public interface Source {
  /** Opens a file by its name below the bundles, such as {@code digits-xnnpack/model.ort}. */
  InputStream open(String name) throws IOException;
}
