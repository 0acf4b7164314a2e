import Foundation

/// A model input or output; the shape is that of one sample.
public struct ModelTensor {
    public let name: String
    public let dtype: String
    public let shape: [Int]

    var count: Int { shape.reduce(1, *) }
}

/// One size of a bundle that has models of several, and the file of its model.
public struct ModelSize {
    public let size: Int
    public let file: String
}

/// Axes of a tensor that have the size of a bucket, and the bytes of one element that fill an input there.
public struct FilledTensor {
    let name: String
    let axes: [Int]
    let element: [Int8]
}

/// What a session is told on devices of a kind, as `edgekit tune` found it; the bundle's own words are in it.
public struct TunedSession {
    let system: String
    let machine: String
    let cores: Int
    let level: Int
    let threads: Int32
    /// What ONNX Runtime's Swift interface cannot say: nodes in parallel, or no arena or memory pattern.
    let isBeyondSwift: Bool
    let providerOptions: [(key: String, value: String)]
    let sessionConfig: [(key: String, value: String)]

    var holds: Bool {
        #if os(macOS)
        let here = "darwin"
        #else
        let here = "ios"
        #endif
        #if arch(arm64)
        let processor = "arm64"
        #else
        let processor = "x86_64"
        #endif
        let counts = cores == 0 || cores == ProcessInfo.processInfo.activeProcessorCount
        return system == here && machine == processor && counts && !isBeyondSwift
    }
}

/// What the loader must know of a bundle; `bundles`, which is made from the manifests, holds one for each.
public struct ModelBundle {
    public let name: String
    public let provider: String
    public let providerOptions: [(key: String, value: String)]
    public let sessionConfig: [(key: String, value: String)]
    public let minimumOrt: String
    public let model: String
    public let files: [(name: String, sha256: String)]
    public let inputs: [ModelTensor]
    public let outputs: [ModelTensor]
    /// The folder of `inputs.npz`, below the bundle's or beside it.
    let golden: String
    /// By the float model's outputs of every sample, or by this model's own of those chosen.
    let judgedByFloat: Bool
    public let samples: Int
    let minCosine: Double
    let minSqnrDb: Double
    let minTop1Agreement: Double
    let grantedSamples: Double
    let chosen: [Int]
    let tolerance: [(name: String, value: Double)]
    let tuned: [TunedSession]
    /// The sizes of a bundle with several, the smallest first; `Sizes` fills `filled`, picks, and cuts `cut`.
    public let sizes: [ModelSize]
    let filled: [FilledTensor]
    let cut: [FilledTensor]

    /// The settings that were found for devices like this one.
    public var foundTuned: TunedSession? { tuned.first { $0.holds } }
}

/// A bundle is damaged, or cannot be opened on this device; the message says which and why.
public struct LoaderError: Error, CustomStringConvertible {
    public let description: String

    init(_ description: String) {
        self.description = description
    }
}
