import CryptoKit
import Foundation

#if canImport(OnnxRuntimeBindings)
import OnnxRuntimeBindings
#else
import onnxruntime_objc
#endif

/// Opens the bundles of this package with ONNX Runtime: checks every file, then sets every session key and provider
/// option of the manifest. Nothing falls back to the CPU in silence: `onCpu` must be asked for.
public struct ModelLoader {
    private let env: ORTEnv
    private let folder: URL
    private let onCpu: Bool
    private let tuned: Bool

    /// Makes a loader. `folder` holds the folders of the bundles; by default it is that of the package's resources.
    /// `tuned` sessions are told what `edgekit tune` found for devices like this one.
    public init(env: ORTEnv, folder: URL? = nil, onCpu: Bool = false, tuned: Bool = true) throws {
        guard let place = folder ?? Foundation.Bundle.module.url(forResource: "Resources", withExtension: nil) else {
            throw LoaderError("the package's resources are not in the app")
        }
        self.env = env
        self.folder = place
        self.onCpu = onCpu
        self.tuned = tuned
    }

    /// Opens the first bundle that this device can run, and says why those before it could not be opened.
    public func openFirst() throws -> (session: ORTSession, bundle: ModelBundle, refusals: [String]) {
        var refusals: [String] = []
        for bundle in bundles {
            do {
                return (try open(bundle), bundle, refusals)
            } catch {
                refusals.append("\(bundle.name): \(error)")
            }
        }
        throw LoaderError("no bundle can be opened here: \(refusals.joined(separator: "; "))")
    }

    /// Opens one bundle; `model` is the file of one size of a bundle with several, for which nothing was tuned.
    public func open(_ bundle: ModelBundle, model: String? = nil) throws -> ORTSession {
        if let version = ORTVersion(), version.compare(bundle.minimumOrt, options: .numeric) == .orderedAscending {
            throw LoaderError("'\(bundle.name)' needs ONNX Runtime \(bundle.minimumOrt), this is \(version)")
        }
        try checkFiles(bundle)
        let options = try ORTSessionOptions()
        let setting = tuned && !onCpu && (model ?? bundle.model) == bundle.model ? bundle.foundTuned : nil
        for (key, value) in setting?.sessionConfig ?? bundle.sessionConfig where !(onCpu && key == "session.disable_cpu_ep_fallback") {
            try options.addConfigEntry(withKey: key, value: value)
        }
        if !onCpu {
            try addProvider(bundle, setting?.providerOptions ?? bundle.providerOptions, to: options)
        }
        if let setting = setting {
            let levels: [Int: ORTGraphOptimizationLevel] = [0: .none, 1: .basic, 2: .extended, 99: .all]
            try options.setGraphOptimizationLevel(levels[setting.level] ?? .all)
            // Where no number was chosen, that which the provider wants stays.
            if setting.threads != 0 {
                try options.setIntraOpNumThreads(setting.threads)
            }
        }
        let path = place(bundle, model ?? bundle.model).path
        return try ORTSession(env: env, modelPath: path, sessionOptions: options)
    }

    /// Throws if a file of the bundle is missing or has another sha256 than it was packed with.
    public func checkFiles(_ bundle: ModelBundle) throws {
        for file in bundle.files {
            guard let handle = try? FileHandle(forReadingFrom: place(bundle, file.name)) else {
                throw LoaderError("'\(file.name)' of bundle '\(bundle.name)' cannot be read")
            }
            defer { try? handle.close() }
            var digest = SHA256()
            while let chunk = try handle.read(upToCount: 1 << 16), !chunk.isEmpty {
                digest.update(data: chunk)
            }
            let hex = digest.finalize().map { String(format: "%02x", $0) }.joined()
            guard hex == file.sha256 else {
                throw LoaderError("'\(file.name)' of bundle '\(bundle.name)' was altered: its sha256 is another")
            }
        }
    }

    /// Runs the golden samples and returns every reason why the outputs do not reach the thresholds; none is a pass.
    public func runSelfTest(_ session: ORTSession, _ bundle: ModelBundle) throws -> [String] {
        try SelfTest(bundle: bundle, folder: folder.appendingPathComponent(bundle.name)).run(session)
    }

    private func place(_ bundle: ModelBundle, _ name: String) -> URL {
        folder.appendingPathComponent(bundle.name).appendingPathComponent(name)
    }

    private func addProvider(
        _ bundle: ModelBundle, _ pairs: [(key: String, value: String)], to options: ORTSessionOptions
    ) throws {
        let given = Dictionary(uniqueKeysWithValues: pairs.map { ($0.key, $0.value) })
        switch bundle.provider {
        case "CPUExecutionProvider":
            return
        case "CoreMLExecutionProvider":
            try options.appendCoreMLExecutionProvider(withOptionsV2: given)
        case "XnnpackExecutionProvider":
            guard given.keys.allSatisfy({ $0 == "intra_op_num_threads" }) else {
                throw LoaderError("this loader does not know an option of XNNPACK: \(given.keys.sorted())")
            }
            let xnnpack = ORTXnnpackExecutionProviderOptions()
            xnnpack.intra_op_num_threads = Int32(given["intra_op_num_threads"] ?? "0") ?? 0
            try options.setIntraOpNumThreads(1) // XNNPACK has its own threads
            try options.appendXnnpackExecutionProvider(with: xnnpack)
        default:
            throw LoaderError("this loader does not know \(bundle.provider)")
        }
    }
}
