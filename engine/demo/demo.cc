// `baton demo`: starts three worker processes and runs two experiments on them.
#include "engine/demo/demo.h"

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "engine/command_line/command_line.h"
#include "engine/command_line/worker_flags.h"
#include "engine/demo/demo_process.h"
#include "engine/demo/demo_report.h"
#include "engine/files/files.h"
#include "engine/serve/loaded_model.h"
#include "engine/serve/metrics.h"

namespace baton::engine::demo {
namespace {

using nlohmann::json;

struct DemoOptions {
  std::string model = serve::default_model();
  std::string out = "out/demo";
  std::string check;
  std::vector<std::string> providers;
  SettingValues settings;
  int max_tokens = 64;
  int rounds = 3;
  int repeats = 5;  // per round
  double ratio = 0.5;
};

void say(std::string_view text) {
  std::fputs(absl::StrCat("==> ", std::string(text), "\n").c_str(), stdout);
  std::fflush(stdout);
}

// The first two CPUs this process may use; the same one twice where there is only one.
std::pair<int, int> two_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof(set), &set);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE && cpus.size() < 2; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  if (cpus.empty()) cpus.push_back(0);
  return {cpus.front(), cpus.back()};
}

json merge_timelines(const json& a, const json& b) {
  json events = a["traceEvents"];
  for (const json& event : b["traceEvents"]) events.push_back(event);
  return {{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}};
}

// Internal, saying where, if a token differs or a prompt's KV did not come over Baton.
absl::Status compare(const json& alone, const json& pair) {
  for (size_t i = 0; i < alone.size(); ++i) {
    if (pair[i]["loaded_tokens"] == 0) {
      return absl::InternalError(absl::StrCat(
          "the KV of prompt ", i, " did not go over Baton: ", pair[i]["error"].get<std::string>()));
    }
    const json& a = alone[i]["tokens"];
    const json& b = pair[i]["tokens"];
    for (size_t k = 0; k < std::max(a.size(), b.size()); ++k) {
      if (k < a.size() && k < b.size() && a[k] == b[k]) continue;
      return absl::InternalError(
          absl::StrCat("prompt ", i, ", output token ", k, ": one process wrote ",
                       k < a.size() ? a[k].dump() : "nothing", ", prefill + decode wrote ",
                       k < b.size() ? b[k].dump() : "nothing", ". The two must be identical."));
    }
  }
  return absl::OkStatus();
}

class Demo {
 public:
  explicit Demo(DemoOptions options) : options_(std::move(options)) {}

  absl::Status run() {
    for (auto step : {&Demo::start, &Demo::check_tokens, &Demo::shape_link, &Demo::write}) {
      if (absl::Status status = (this->*step)(); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

 private:
  absl::Status start();
  absl::Status check_tokens();
  absl::Status shape_link();
  absl::Status write();

  absl::StatusOr<std::string> start_pair(const std::string& link, bool serialized);
  absl::StatusOr<json> stop_pair();
  json request(const std::vector<int32_t>& tokens, int max_tokens, size_t index) const;
  absl::Status measure(DemoProcess& process, const std::string& address, DemoLinkRun* run);

  const DemoOptions options_;
  std::unique_ptr<DemoProcess> alone_, prefill_, decode_;
  std::vector<std::vector<int32_t>> prompts_;
  size_t block_bytes_ = 0;  // all layers
  std::string route_;
  DemoResults results_;
};

absl::Status Demo::start() {
  const auto [first, second] = two_cpus();
  std::random_device random;
  std::string secret;
  for (int i = 0; i < 8; ++i) absl::StrAppend(&secret, absl::Hex(random(), absl::kZeroPad8));
  const auto spawn = [&](bool session, const char* name, int cpu) {
    return DemoProcess::fork({name, session, options_.model, secret, cpu});
  };
  auto alone = spawn(false, "one process", first);
  auto prefill = spawn(true, "prefill", first);
  auto decode = spawn(true, "decode", second);
  for (const auto* process : {&alone, &prefill, &decode}) {
    if (!process->ok()) return process->status();
  }
  alone_ = *std::move(alone);
  prefill_ = *std::move(prefill);
  decode_ = *std::move(decode);

  const absl::StatusOr<serve::LoadedModel> loaded = serve::load_model(options_.model);
  if (!loaded.ok()) return loaded.status();
  const ModelConfig& config = loaded->model.config();
  const KvGeometry geometry = loaded->model.kv_geometry();
  block_bytes_ = geometry.block_bytes() * static_cast<size_t>(geometry.layers);
  const absl::StatusOr<json> started = alone_->call({{"do", "start"}});
  if (!started.ok()) return started.status();
  const size_t context = (*started)["context"];
  if (context < static_cast<size_t>(options_.max_tokens) + 64) {
    return absl::InvalidArgumentError(
        absl::StrCat("the model's context of ", context, " tokens is too short for this demo"));
  }
  for (absl::string_view passage : absl::StrSplit(kDemoPrompts, "\n%\n")) {
    std::string text(passage);
    while (!text.empty() && text.back() == '\n') text.pop_back();
    std::vector<int32_t> tokens = loaded->tokenizer.encode(text);
    tokens.resize(std::min(tokens.size(), context - static_cast<size_t>(options_.max_tokens)));
    prompts_.push_back(std::move(tokens));
  }
  results_.model = loaded->name;
  results_.parameters = config.num_parameters();
  results_.layers = config.num_layers;
  results_.prompts = prompts_.size();
  const auto shorter = [](const auto& a, const auto& b) { return a.size() < b.size(); };
  const auto [low, high] = std::minmax_element(prompts_.begin(), prompts_.end(), shorter);
  results_.shortest_prompt = low->size();
  results_.longest_prompt = high->size();
  say(absl::StrFormat("%s: %.2f million parameters, %d layers; prefill on CPU %d, decode on CPU %d",
                      results_.model, static_cast<double>(results_.parameters) * 1e-6,
                      results_.layers, first, second));
  return absl::OkStatus();
}

absl::StatusOr<std::string> Demo::start_pair(const std::string& link, bool serialized) {
  const json command = {{"do", "start"},
                        {"link", link},
                        {"serialized", serialized},
                        {"providers", options_.providers},
                        {"settings", options_.settings}};
  const absl::StatusOr<json> prefill = prefill_->call(command);
  if (!prefill.ok()) return prefill.status();
  const absl::StatusOr<json> decode = decode_->call(command);
  if (!decode.ok()) return decode.status();
  return (*prefill)["address"].get<std::string>();
}

// The joined timeline of both.
absl::StatusOr<json> Demo::stop_pair() {
  const absl::StatusOr<json> decode = decode_->call({{"do", "stop"}});
  if (!decode.ok()) return decode.status();
  const absl::StatusOr<json> prefill = prefill_->call({{"do", "stop"}});
  if (!prefill.ok()) return prefill.status();
  route_ = (*decode)["route"];  // prefill was still there when decode was asked
  return merge_timelines((*prefill)["timeline"], (*decode)["timeline"]);
}

// Every other prompt is sampled, with a seed of its own.
json Demo::request(const std::vector<int32_t>& tokens, int max_tokens, size_t index) const {
  return {{"tokens", tokens},
          {"max_tokens", max_tokens},
          {"temperature", index % 2 == 0 ? 0.8 : 0.0},
          {"seed", index}};
}

absl::Status Demo::check_tokens() {
  say(absl::StrFormat(
      "%d prompts of %d to %d tokens, %d more each: one process, then prefill + "
      "decode",
      prompts_.size(), results_.shortest_prompt, results_.longest_prompt, options_.max_tokens));
  json requests = json::array();
  for (const auto& prompt : prompts_) {
    requests.push_back(request(prompt, options_.max_tokens, requests.size()));
  }
  const auto command = [&](const std::string& prefill, bool together, const json& list) -> json {
    return {{"do", "run"}, {"prefill", prefill}, {"together", together}, {"requests", list}};
  };
  const json warm_up = json::array({requests[0]});
  if (auto warm = alone_->call(command("", false, warm_up)); !warm.ok()) return warm.status();
  const absl::StatusOr<json> alone = alone_->call(command("", false, requests));
  if (!alone.ok()) return alone.status();

  const absl::StatusOr<std::string> address = start_pair("", false);
  if (!address.ok()) return address.status();
  if (auto warm = decode_->call(command(*address, false, warm_up)); !warm.ok()) {
    return warm.status();
  }
  const absl::StatusOr<json> pair = decode_->call(command(*address, false, requests));
  if (!pair.ok()) return pair.status();
  const absl::StatusOr<json> together = decode_->call(command(*address, true, requests));
  if (!together.ok()) return together.status();
  const absl::StatusOr<json> timeline = stop_pair();
  if (!timeline.ok()) return timeline.status();

  const json& want = (*alone)["outcomes"];
  for (const auto* other : {&pair, &together}) {
    if (absl::Status status = compare(want, (**other)["outcomes"]); !status.ok()) return status;
  }
  for (const json& outcome : want) results_.tokens_compared += 2 * outcome["tokens"].size();
  const absl::StatusOr<Overlap> moved = measure_overlap(timeline->dump());
  if (!moved.ok()) return moved.status();
  results_.moved = *moved;
  results_.route = route_;
  std::printf("  tokens: identical (%zu compared: prompts one by one, then all at once)\n%s",
              results_.tokens_compared, moved_line(results_).c_str());
  std::fflush(stdout);
  return absl::OkStatus();
}

// Appends the times to first token of one round.
absl::Status Demo::measure(DemoProcess& process, const std::string& address, DemoLinkRun* run) {
  const auto command = [&](int count) -> json {
    json requests = json::array();
    for (int i = 0; i < count; ++i) requests.push_back(request(prompts_.back(), 1, 1));
    return {{"do", "run"}, {"prefill", address}, {"together", false}, {"requests", requests}};
  };
  if (auto warm = process.call(command(2)); !warm.ok()) return warm.status();
  const absl::StatusOr<json> reply = process.call(command(options_.repeats));
  if (!reply.ok()) return reply.status();
  for (const json& outcome : (*reply)["outcomes"]) run->ttft_ms.push_back(outcome["ttft_ms"]);
  return absl::OkStatus();
}

absl::Status Demo::shape_link() {
  // The link is chosen by what this machine can do now.
  DemoLinkRun calibration;
  if (absl::Status status = measure(*alone_, "", &calibration); !status.ok()) return status;
  const size_t tokens = prompts_.back().size();
  const double prefill_s = serve::percentile(calibration.ttft_ms, 50) * 1e-3;
  results_.link_prompt = tokens;
  results_.link_bytes = (tokens - 1 + kBlockTokens - 1) / kBlockTokens * block_bytes_;
  results_.ratio = options_.ratio;
  results_.link_bytes_per_second =
      static_cast<double>(results_.link_bytes) / (options_.ratio * prefill_s);
  const std::string link = absl::StrFormat("%.3fMB/s", results_.link_bytes_per_second * 1e-6);
  say(absl::StrFormat("time to first token over a link of %s, %d rounds of %d runs", link,
                      options_.rounds, options_.repeats));

  std::vector<DemoLinkRun>& runs = results_.link_runs;
  runs = {{.name = "one process"},
          {.name = "KV after prefill", .has_transfer = true},
          {.name = "KV layer by layer", .has_transfer = true}};
  if (auto restart = alone_->call({{"do", "start"}}); !restart.ok()) return restart.status();
  for (int round = 0; round < options_.rounds; ++round) {
    if (absl::Status status = measure(*alone_, "", &runs[0]); !status.ok()) return status;
    for (size_t mode : {1, 2}) {
      const absl::StatusOr<std::string> address = start_pair(link, mode == 1);
      if (!address.ok()) return address.status();
      if (absl::Status status = measure(*decode_, *address, &runs[mode]); !status.ok()) {
        return status;
      }
      const absl::StatusOr<json> timeline = stop_pair();
      if (!timeline.ok()) return timeline.status();
      if (runs[mode].timeline.is_null()) {
        runs[mode].timeline = *timeline;
      } else {
        runs[mode].timeline = merge_timelines(runs[mode].timeline, *timeline);
      }
    }
  }
  const absl::StatusOr<json> stopped = alone_->call({{"do", "stop"}});
  if (!stopped.ok()) return stopped.status();
  for (size_t mode : {1, 2}) {
    const absl::StatusOr<Overlap> overlap = measure_overlap(runs[mode].timeline.dump());
    if (!overlap.ok()) return overlap.status();
    runs[mode].overlap = *overlap;
  }
  std::fputs(link_table(results_).c_str(), stdout);
  return absl::OkStatus();
}

absl::Status Demo::write() {
  const std::pair<const char*, std::string> files[] = {
      {"timeline.json", results_.link_runs[2].timeline.dump()},
      {"timeline-serialized.json", results_.link_runs[1].timeline.dump()}};
  for (const auto& [name, content] : files) {
    absl::Status status =
        write_file_atomically(absl::StrCat(options_.out, "/", name), std::string_view(content));
    if (!status.ok()) return status;
  }
  say(absl::StrCat("timelines: ", options_.out, "/timeline.json and ", options_.out,
                   "/timeline-serialized.json (open them at ui.perfetto.dev)"));
  return absl::OkStatus();
}

// Two runs into one folder would leave a timeline of each.
absl::Status run_alone(DemoOptions options) {
  if (absl::Status status = make_directories(options.out); !status.ok()) return status;
  const absl::StatusOr<FolderLock> lock = FolderLock::take(options.out);
  if (!lock.ok()) return lock.status();
  return Demo(std::move(options)).run();
}

int check_timeline(const std::string& path) {
  const absl::StatusOr<std::string> text = read_file(path);
  const absl::StatusOr<Overlap> overlap =
      text.ok() ? measure_overlap(*text) : absl::StatusOr<Overlap>(text.status());
  if (!overlap.ok()) {
    std::fprintf(stderr, "baton demo: %s\n", std::string(overlap.status().message()).c_str());
    return 2;
  }
  std::printf(
      "%zu requests, %.3f ms of transfer (%.2f MB), %.3f ms of it during their own "
      "prefill: %.1f %% hidden\n",
      overlap->requests, overlap->transfer_us * 1e-3, static_cast<double>(overlap->bytes) * 1e-6,
      overlap->hidden_us * 1e-3, 100 * overlap->hidden_share());
  return 0;
}

// What people typed: this is a command of `baton`, and a program of its own.
std::string command_name(std::string_view program) {
  return program.ends_with("baton-demo") ? "baton-demo" : "baton demo";
}

}  // namespace

int demo_main(int argc, char** argv) {
  DemoOptions options;
  CLI::App app("Prefill and decode in two processes, KV moved by Baton, timed.");
  app.add_option("--model", options.model,
                 "the model's folder (default: the small one of Baton's own)")
      ->type_name("DIR");
  app.add_option("--out", options.out, "folder for the timelines")
      ->check(command_line::writable_folder())
      ->type_name("DIR")
      ->capture_default_str();
  command_line::add_providers(app, options.providers);
  command_line::add_settings(app, options.settings);
  app.add_option("--max-tokens", options.max_tokens, "output tokens per prompt")
      ->check(command_line::whole_number(1, 512))
      ->capture_default_str();
  app.add_option("--rounds", options.rounds, "rounds over the slow link")
      ->check(command_line::whole_number(1, 1000))
      ->capture_default_str();
  app.add_option("--repeats", options.repeats, "runs per round and way of sending")
      ->check(command_line::whole_number(1, 1000))
      ->capture_default_str();
  app.add_option("--ratio", options.ratio,
                 "time of the KV on the slow link, as a multiple of prefill's time")
      ->check(command_line::real_number(0.01, 10.0))
      ->capture_default_str();
  app.add_option("--check", options.check,
                 "run nothing: recompute the hidden share from the timeline of an earlier run")
      ->check(command_line::readable_file())
      ->type_name("FILE");
  const std::string name = command_name(argv[0]);
  if (const int status = command_line::parse(app, name, argc, argv); status >= 0) return status;
  command_line::tell_idle_settings(name, options.settings, options.providers);
  if (!options.check.empty()) return check_timeline(options.check);

  const absl::Status status = run_alone(std::move(options));
  if (status.ok()) return 0;
  std::fprintf(stderr, "baton demo: %s\n", std::string(status.message()).c_str());
  return absl::IsInternal(status) ? 1 : 2;
}

}  // namespace baton::engine::demo
