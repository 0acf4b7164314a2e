package use

import ai.onnxruntime.OrtEnvironment
import java.io.File

/** Opens a bundle with the snippet of its target: `Snippets TARGET FOLDER`. */
fun main(arguments: Array<String>) {
    OrtEnvironment.getEnvironment() // has a thread of its own
    val before = File("/proc/self/task").list()!!.size
    val folder = File(arguments[1])
    val session = when (arguments[0]) {
        "nnapi" -> nnapi.ModelSession.open(folder)
        "xnnpack" -> xnnpack.ModelSession.open(folder)
        else -> cpu.ModelSession.open(folder)
    }
    session.use {
        println("threads: ${File("/proc/self/task").list()!!.size - before}")
        println("inputs: ${it.inputNames}")
    }
}
