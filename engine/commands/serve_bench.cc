// `baton serve_bench`: load on an OpenAI-compatible server, with definitions and JSON keys of `vllm
// bench serve`; on several servers in turns, to compare them.
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include "absl/strings/str_cat.h"
#include "engine/command_line/command_line.h"
#include "engine/command_line/values.h"
#include "engine/commands/serve_cli.h"
#include "engine/demo/demo.h"
#include "engine/files/files.h"
#include "engine/load/load.h"
#include "engine/load/workload.h"

namespace baton::engine::commands {
namespace {

using nlohmann::json;

constexpr const char* kCommand = "baton serve_bench";
constexpr size_t kClosedLoop = 8;  // clients, where neither a rate nor their number is given

struct BenchOptions {
  std::string url = "http://127.0.0.1:8000";
  std::string host;  // instead of the URL
  int port = 8000;
  std::string name = "this server";
  std::vector<std::string> baselines;  // NAME=URL
  std::string model;
  std::string key;
  double temperature = 0.7;
  bool ignore_eos = true;
  load::WorkloadOptions workload;
  double rate = 0;
  size_t concurrency = 0;
  int warmups = 0;
  int rounds = 1;
  int64_t timeout = 600;
  std::string percentiles = "99";
  load::ReportOptions report;
  std::string json_file;
};

struct Target {
  std::string name;
  load::Server server;
  std::vector<load::LoadResult> rounds;
};

// A check by a parser of ours.
template <typename Parse>
CLI::Validator parsed_by(Parse parse) {
  return {[parse](const std::string& text) { return std::string(parse(text).status().message()); },
          ""};
}

CLI::Validator a_url() { return parsed_by(http::HttpUrl::parse); }

CLI::Validator a_baseline() {
  return {[](const std::string& text) {
            const size_t equals = text.find('=');
            if (equals == 0 || equals == std::string::npos) {
              return absl::StrCat("\"", text, "\" is not NAME=URL");
            }
            return std::string(http::HttpUrl::parse(text.substr(equals + 1)).status().message());
          },
          ""};
}

// "inf" is what vLLM's benchmark calls no rate.
CLI::Validator a_rate() {
  return {[](std::string& text) {
            if (text == "inf") text = "0";
            return command_line::real_number(0, 1e6)(text);
          },
          ""};
}

void add_server_flags(CLI::App& app, BenchOptions& options) {
  app.add_option("--url,--base-url", options.url,
                 "the server, by http or https (SSL_CERT_FILE: file with trusted certificates)")
      ->check(a_url())
      ->type_name("URL")
      ->capture_default_str();
  app.add_option("--host", options.host, "the server by its host and --port, instead of --url")
      ->type_name("HOST");
  app.add_option("--port", options.port, "with --host")
      ->check(command_line::whole_number(1, 65535))
      ->capture_default_str();
  app.add_option("--name", options.name, "its name in comparisons")
      ->type_name("NAME")
      ->capture_default_str();
  app.add_option("--baseline", options.baselines,
                 "another server that gets the same requests in turns; may be repeated")
      ->check(a_baseline())
      ->type_name("NAME=URL");
  app.add_option("--model", options.model, "the model's name [the one that each server reports]")
      ->type_name("NAME");
  app.add_flag("--ignore-eos", options.ignore_eos, "do not end an answer at the end-of-text token");
  app.add_option("--api-key", options.key, "of the servers")->type_name("KEY");
  app.add_option("--temperature", options.temperature, "of sampling")
      ->check(command_line::real_number(0, 2))
      ->capture_default_str();
}

void add_workload_flags(CLI::App& app, load::WorkloadOptions& workload) {
  const auto tokens = [&](const char* flags, auto& value, const char* meaning) {
    app.add_option(flags, value, meaning)
        ->check(command_line::whole_number(1, 1 << 20))
        ->capture_default_str();
  };
  app.add_option("--dataset-name", workload.dataset,
                 "prompts: passages of text, random tokens, or a trace in Mooncake's format")
      ->check(command_line::one_of(load::dataset_names()))
      ->capture_default_str();
  app.add_option("--dataset-path", workload.file, "file for mooncake")
      ->check(command_line::readable_file())
      ->type_name("FILE");
  app.add_option("--num-prompts", workload.requests, "most requests")
      ->check(command_line::whole_number(1, 1'000'000))
      ->capture_default_str();
  tokens("--prompt-bytes", workload.text_bytes, "text: length of a prompt");
  app.add_option("--output-len,--random-output-len", workload.output,
                 "tokens per request [64, or as the trace has it]")
      ->check(command_line::whole_number(1, 1 << 20))
      ->default_str("");
  tokens("--input-len,--random-input-len", workload.input, "random: tokens of a prompt");
  app.add_option("--trace-scale", workload.trace_scale,
                 "mooncake: all lengths times this, for small models")
      ->check(command_line::real_number(1e-4, 1e3))
      ->capture_default_str();
  app.add_option("--trace-speed", workload.trace_speed,
                 "mooncake: factor by which its clock runs faster; its times count unless "
                 "--request-rate is given")
      ->check(command_line::real_number(1e-4, 1e6))
      ->capture_default_str();
  app.add_option("--seed", workload.seed, "seed of prompts, arrivals and sampling")
      ->check(command_line::whole_number(0, UINT64_MAX))
      ->capture_default_str();
}

void add_load_flags(CLI::App& app, BenchOptions& options) {
  app.add_option("--request-rate", options.rate,
                 "arrivals per second; 0 or inf: as fast as --max-concurrency allows")
      ->transform(a_rate())
      ->type_name("RATE")
      ->capture_default_str();
  app.add_option("--max-concurrency", options.concurrency,
                 "most concurrent requests [8; no limit with a rate or a trace]")
      ->check(command_line::whole_number(1, 100'000))
      ->default_str("");
  app.add_option("--num-warmups", options.warmups, "warmup requests, which do not count")
      ->check(command_line::whole_number(0, 100'000))
      ->capture_default_str();
  app.add_option("--rounds", options.rounds, "rounds of the whole, each with different prompts")
      ->check(command_line::whole_number(1, 1000))
      ->capture_default_str();
  app.add_option("--timeout", options.timeout, "time limit of an answer, in seconds")
      ->check(command_line::whole_number(1, 1'000'000))
      ->capture_default_str();
}

void add_report_flags(CLI::App& app, BenchOptions& options) {
  app.add_option("--metric-percentiles", options.percentiles, "such as 50,90,99")
      ->check(parsed_by(load::parse_percentiles))
      ->type_name("LIST")
      ->capture_default_str();
  app.add_option("--json,--result-filename", options.json_file, "write the report to this file")
      ->check(command_line::writable_file())
      ->type_name("FILE");
  app.add_flag("--save-detailed", options.report.detailed, "include every request in it");
}

int fail(const absl::Status& status) {
  std::fprintf(stderr, "%s: %s\n", kCommand, std::string(status.message()).c_str());
  return 1;
}

// Asks each server what it serves: one that is none is told before anything is measured.
absl::Status prepare(const std::shared_ptr<http::EventLoop>& loop, const BenchOptions& options,
                     std::vector<Target>& targets, load::Words& words) {
  for (Target& target : targets) {
    if (!options.model.empty()) {
      target.server.model = options.model;
      continue;
    }
    const auto model = load::model_of(loop, target.server);
    if (!model.ok()) return model.status();
    target.server.model = *model;
  }
  if (!load::needs_of(options.workload).words) return absl::OkStatus();
  const auto found = load::words_of(loop, targets.front().server, demo::kDemoPrompts);
  if (!found.ok()) return found.status();
  words = *found;
  return absl::OkStatus();
}

load::LoadOptions load_of(const BenchOptions& options,
                          const std::vector<load::LoadRequest>& requests, uint64_t seed) {
  load::LoadOptions load{.concurrency = options.concurrency,
                         .seed = seed,
                         .timeout = std::chrono::seconds(options.timeout)};
  const bool timed = requests.back().at > Time{};
  if (options.rate > 0) {
    load.at = load::arrivals(requests.size(), options.rate, seed + 1);
  } else if (timed) {
    for (const load::LoadRequest& request : requests) load.at.push_back(request.at);
  } else if (load.concurrency == 0) {
    load.concurrency = kClosedLoop;
  }
  return load;
}

absl::Status run_rounds(const std::shared_ptr<http::EventLoop>& loop, const BenchOptions& options,
                        const load::Words& words, std::vector<Target>& targets) {
  if (options.warmups > 0) {
    load::WorkloadOptions warm = options.workload;
    warm.requests = static_cast<size_t>(options.warmups);
    warm.seed = ~warm.seed;
    for (const Target& target : targets) {
      const auto requests = load::make_workload(warm, words);
      if (!requests.ok()) return requests.status();
      (void)load::run_load(loop, target.server, *requests,
                           {.concurrency = kClosedLoop, .seed = warm.seed});
    }
  }
  for (int round = 0; round < options.rounds; ++round) {
    load::WorkloadOptions workload = options.workload;
    workload.seed += static_cast<uint64_t>(round) * workload.requests;
    const auto requests = load::make_workload(workload, words);
    if (!requests.ok()) return requests.status();
    const load::LoadOptions load = load_of(options, *requests, workload.seed);
    for (size_t i = 0; i < targets.size(); ++i) {  // each is the first now and then
      Target& target = targets[(i + static_cast<size_t>(round)) % targets.size()];
      target.rounds.push_back(load::run_load(loop, target.server, *requests, load));
    }
  }
  return absl::OkStatus();
}

json settings_of(const BenchOptions& options, const Target& target) {
  return {{"name", target.name},
          {"url", target.server.url.text()},
          {"model_id", target.server.model},
          {"dataset_name", options.workload.dataset},
          {"num_prompts", options.workload.requests},
          {"rounds", options.rounds},
          {"request_rate", options.rate > 0 ? json(options.rate) : json("inf")},
          {"seed", options.workload.seed}};
}

// What only our servers tell is reported where one has told it.
void choose_metrics(BenchOptions& options, const std::vector<load::LoadResult>& results) {
  const auto any = [&](Time load::Answer::*time) {
    for (const load::LoadResult& result : results) {
      for (const load::Answer& answer : result.answers) {
        if (answer.*time > Time{}) return true;
      }
    }
    return false;
  };
  if (any(&load::Answer::queued)) options.report.metrics.emplace_back("queued");
  if (any(&load::Answer::kv_wait)) options.report.metrics.emplace_back("kv_wait");
}

int tell_failures(const std::vector<std::pair<std::string, load::LoadResult>>& results) {
  int status = 0;
  for (const auto& [name, result] : results) {
    size_t failed = 0;
    const std::string* first = nullptr;
    for (const load::Answer& answer : result.answers) {
      if (answer.ok()) continue;
      if (failed++ == 0) first = &answer.error;
    }
    if (failed == 0) continue;
    status = 1;
    std::fprintf(stderr, "%s: %zu of %zu requests failed at %s; the first: %s\n", kCommand, failed,
                 result.answers.size(), name.c_str(), first->c_str());
  }
  return status;
}

std::vector<Target> targets_of(const BenchOptions& options) {
  std::vector<Target> targets;
  const auto add = [&](const std::string& name, const std::string& url) {
    targets.push_back({.name = name,
                       .server = {.url = *http::HttpUrl::parse(url),
                                  .key = options.key,
                                  .temperature = options.temperature}});
  };
  const std::string url =
      options.host.empty() ? options.url : absl::StrCat("http://", options.host, ":", options.port);
  add(options.baselines.empty() ? url : options.name, url);
  for (const std::string& baseline : options.baselines) {
    const size_t equals = baseline.find('=');
    add(baseline.substr(0, equals), baseline.substr(equals + 1));
  }
  return targets;
}

}  // namespace

int serve_bench_main(int argc, char** argv) {
  BenchOptions options;
  CLI::App app("Loads an OpenAI-compatible server and reports latencies.");
  add_server_flags(app, options);
  add_workload_flags(app, options.workload);
  add_load_flags(app, options);
  add_report_flags(app, options);
  if (const int status = command_line::parse(app, kCommand, argc, argv); status >= 0) {
    return status;
  }
  if (options.host.empty() && app.count("--port") > 0) {
    std::fprintf(stderr, "%s: --port is for --host; or give --url http://HOST:PORT\n", kCommand);
    return command_line::kUsage;
  }
  if (load::needs_of(options.workload).file && options.workload.file.empty()) {
    std::fprintf(stderr, "%s: --dataset-name %s needs a file: add --dataset-path\n", kCommand,
                 options.workload.dataset.c_str());
    return command_line::kUsage;
  }
  options.report.percentiles = *load::parse_percentiles(options.percentiles);

  const auto loop = std::make_shared<http::EventLoop>();
  loop->start();
  std::vector<Target> targets = targets_of(options);
  load::Words words;
  if (const absl::Status status = prepare(loop, options, targets, words); !status.ok()) {
    return fail(status);
  }
  if (const absl::Status status = run_rounds(loop, options, words, targets); !status.ok()) {
    return fail(status);
  }
  loop->stop();

  std::vector<load::LoadResult> results;
  for (Target& target : targets) results.push_back(load::joined(std::move(target.rounds)));
  choose_metrics(options, results);
  std::vector<std::pair<std::string, json>> reports;
  std::vector<std::pair<std::string, load::LoadResult>> named;
  for (size_t i = 0; i < targets.size(); ++i) {
    json report = load::report_of(results[i], options.report);
    report.update(settings_of(options, targets[i]));
    reports.emplace_back(targets[i].name, std::move(report));
    named.emplace_back(targets[i].name, std::move(results[i]));
  }
  std::fputs(load::table_of(reports, options.report).c_str(), stdout);
  if (!options.json_file.empty()) {
    json report = reports.front().second;
    for (size_t i = 1; i < reports.size(); ++i) {
      report["baselines"].push_back(std::move(reports[i].second));
    }
    const std::string text = report.dump() + "\n";
    const absl::Status status = write_file_atomically(options.json_file, std::string_view(text));
    if (!status.ok()) return fail(status);
  }
  return tell_failures(named);
}

}  // namespace baton::engine::commands
