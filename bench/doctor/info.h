// `baton info`: what this machine has, as text or as JSON.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "bench/doctor/info_root.h"
#include "bench/report/report.h"

namespace baton::bench {

// Everything there is to know: {"baton","kernel","providers","rdma_devices","gpus","nvidia","cuda",
// "distances","limits","memory","network","numa"}. `providers` comes from probe_providers().
// `cuda` from cuda_info(); null: no caller asked, as for another machine's tree.
Json collect_info(const SystemRoot& root, Json providers, Json cuda = nullptr);
// The same of this machine, with its CUDA devices; or of another one's /proc and /sys, which lie
// below `folder`.
Json machine_info(const std::string& folder);

std::string info_text(const Json& info);

int info_main(int argc, char** argv);

// The command line that info and doctor share.
struct InfoOptions {
  std::string root;      // read /proc and /sys below this folder
  std::string provider;  // doctor: judge for this one
  bool json = false;
  bool settings = false;  // info: only the settings and environment variables
  bool markdown = false;  // these as docs/settings.md has them
  std::string file;       // for the JSON; "": standard output
};
// The exit status to leave with at once, or -1.
int parse_info(int argc, const char* const* argv, bool doctor, InfoOptions& options);

// Prints JSON where the options say.
absl::Status print_json(const InfoOptions& options, const Json& json);

}  // namespace baton::bench
