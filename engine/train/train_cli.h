// `baton train`: trains a small Llama on text and writes a Hugging Face directory.
#pragma once

namespace baton::engine::train {

// Options: --preset nano|small, --steps N, --out DIR, --data FILE, --ranks N, and the rest in
// --help. Returns an exit status; errors go to stderr.
int train_main(int argc, char** argv);

}  // namespace baton::engine::train
