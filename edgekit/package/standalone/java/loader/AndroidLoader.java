package edgekit.loader;

import android.content.Context;
import android.content.res.AssetManager;
import java.io.File;
import java.io.IOException;
import java.io.InputStream;

/** A loader of the bundles in an app's assets; the only class here that needs Android. */
public final class AndroidLoader {
  private AndroidLoader() {}

  /** Returns a loader that unpacks into the app's own folder and knows the QNN provider of the app, if it has one. */
  public static Loader of(Context context) {
    final AssetManager assets = context.getAssets();
    Source source =
        new Source() {
          @Override
          public InputStream open(String name) throws IOException {
            return assets.open(Bundles.ASSETS + "/" + name);
          }
        };
    File plugin = new File(context.getApplicationInfo().nativeLibraryDir, "libonnxruntime_providers_qnn.so");
    return new Loader(source, new File(context.getFilesDir(), "edgekit")).withPlugin(plugin.getPath());
  }
}
