// `baton demo`: the main job, end to end, with a report.
#pragma once

namespace baton::engine::demo {

// Forks three processes: one that serves alone, and a pair of a prefill and a decode worker joined
// by Baton. Continues real prompts with both and compares every token; then measures time to first
// token over a link of chosen bandwidth, with the KV sent after prefill and layer by layer. Prints
// tables and writes timeline.json under --out (default out/demo).
// Returns 1 if a token differs or the KV did not go over Baton, 2 if something could not be run.
// Call it before any thread is started. `--check FILE` only recomputes the hidden share.
int demo_main(int argc, char** argv);

// Passages of the King James text, separated by lines with a "%".
extern const char* const kDemoPrompts;

}  // namespace baton::engine::demo
