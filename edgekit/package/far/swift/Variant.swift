import Foundation

/// A model input or output; the shape is that of one sample.
public struct ModelTensor {
    public let name: String
    public let dtype: String
    public let shape: [Int]

    var count: Int { shape.reduce(1, *) }
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
}

/// A bundle is damaged, or cannot be opened on this device; the message says which and why.
public struct LoaderError: Error, CustomStringConvertible {
    public let description: String

    init(_ description: String) {
        self.description = description
    }
}
