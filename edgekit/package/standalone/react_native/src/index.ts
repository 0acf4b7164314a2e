export { ASSETS, bundles, VERSION } from "./bundles";
export { deviceFiles, type Files, type FileSystem } from "./files";
export { Loader, type Device, type Opened } from "./loader";
export { LoaderError, type ModelBundle, type ModelTensor } from "./variant";
