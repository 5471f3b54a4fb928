// `baton serve_bench`: open-loop or closed-loop load on an HTTP endpoint, with the definitions and
// the JSON keys of `vllm bench serve`.
#include <httplib.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <CLI/CLI.hpp>

#include "absl/strings/str_cat.h"
#include "engine/command_line/command_line.h"
#include "engine/command_line/values.h"
#include "engine/commands/serve_cli.h"
#include "engine/demo/demo.h"
#include "engine/files/files.h"
#include "engine/files/json_fields.h"
#include "engine/http/http_fetch.h"
#include "engine/serve/metrics.h"

namespace baton::engine::commands {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

struct BenchOptions {
  std::string url = "http://127.0.0.1:8000";
  int requests = 100;
  double rate = 0;  // per second; 0: closed loop
  int concurrency = 8;
  size_t prompt_bytes = 1000;
  int output = 64;
  uint64_t seed = 1;
  std::string json_file;
};

struct Sample {
  bool ok = false;
  double ttft_ms = 0, e2e_ms = 0;
  std::vector<double> itl_ms;
  size_t input = 0, output = 0;
  double tpot_ms() const {
    return output > 1 ? (e2e_ms - ttft_ms) / static_cast<double>(output - 1) : 0;
  }
};

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// One streamed completion.
Sample measure(const BenchOptions& options, const std::string& prompt, uint64_t seed) {
  httplib::Client client(options.url);
  client.set_read_timeout(std::chrono::seconds(300));
  client.set_tcp_nodelay(true);
  httplib::Request request;
  request.method = "POST";
  request.path = "/v1/completions";
  request.set_header("Content-Type", "application/json");
  request.body = json{{"prompt", prompt},
                      {"max_tokens", options.output},
                      {"temperature", 0.7},
                      {"seed", seed},
                      {"ignore_eos", true},
                      {"stream", true},
                      {"stream_options", {{"include_usage", true}}}}
                     .dump(-1, ' ', false, json::error_handler_t::replace);
  Sample sample;
  std::string buffer;
  double last_ms = 0;
  const Clock::time_point start = Clock::now();
  request.content_receiver = [&](const char* data, size_t size, uint64_t, uint64_t) {
    buffer.append(data, size);
    for (size_t end; (end = buffer.find("\n\n")) != std::string::npos; buffer.erase(0, end + 2)) {
      const std::string_view line = std::string_view(buffer).substr(0, end);
      if (!line.starts_with("data: ")) continue;
      if (line == "data: [DONE]") {
        sample.ok = sample.output > 0;
        continue;
      }
      const absl::StatusOr<json> event = parse_json(line.substr(6), "an event");
      if (!event.ok()) continue;
      const json& usage = member(*event, "usage");
      if (usage.is_object()) {
        sample.input =
            static_cast<size_t>(int_field(usage, "prompt_tokens", 0, INT32_MAX, 0).value_or(0));
      }
      const json& choices = member(*event, "choices");
      if (!choices.is_array() || choices.empty()) continue;
      const double now_ms = ms_since(start);
      if (sample.output++ == 0) {
        sample.ttft_ms = now_ms;
      } else {
        sample.itl_ms.push_back(now_ms - last_ms);
      }
      last_ms = sample.e2e_ms = now_ms;
    }
    return true;
  };
  client.send(request);
  return sample;
}

// Passages of the demo's texts, cut at random places; deterministic per seed.
std::vector<std::string> make_prompts(const BenchOptions& options) {
  const std::string text = demo::kDemoPrompts;
  std::mt19937_64 random(options.seed);
  std::vector<std::string> prompts(static_cast<size_t>(options.requests));
  for (std::string& prompt : prompts) {
    const size_t begin = random() % text.size();
    while (prompt.size() < options.prompt_bytes) {
      const size_t from = prompt.empty() ? begin : 0;
      prompt += text.substr(from, options.prompt_bytes - prompt.size());
    }
  }
  return prompts;
}

std::vector<Sample> run_load(const BenchOptions& options, double* seconds) {
  const std::vector<std::string> prompts = make_prompts(options);
  std::vector<Sample> samples(prompts.size());
  std::vector<std::thread> threads;
  const Clock::time_point start = Clock::now();
  if (options.rate > 0) {
    // Open loop: arrivals do not wait for replies. Gaps are renormalised so that all requests
    // arrive within requests / rate seconds.
    std::mt19937_64 random(options.seed + 1);
    std::exponential_distribution<double> gap(options.rate);
    std::vector<double> at(prompts.size());
    double sum = 0;
    for (double& time : at) time = sum += gap(random);
    const double scale = static_cast<double>(prompts.size()) / options.rate / sum;
    for (size_t i = 0; i < prompts.size(); ++i) {
      std::this_thread::sleep_until(start + std::chrono::duration_cast<Clock::duration>(
                                                std::chrono::duration<double>(at[i] * scale)));
      threads.emplace_back([&, i] { samples[i] = measure(options, prompts[i], i); });
    }
  } else {
    std::atomic<size_t> next{0};
    for (int t = 0; t < options.concurrency; ++t) {
      threads.emplace_back([&] {
        for (size_t i; (i = next++) < prompts.size();) {
          samples[i] = measure(options, prompts[i], i);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    threads.clear();
  }
  for (std::thread& thread : threads) thread.join();
  *seconds = ms_since(start) * 1e-3;
  return samples;
}

void summarize(json* report, const char* name, const std::vector<double>& values) {
  double sum = 0;
  for (double value : values) sum += value;
  const double mean = values.empty() ? 0 : sum / static_cast<double>(values.size());
  (*report)[absl::StrCat("mean_", name, "_ms")] = mean;
  (*report)[absl::StrCat("median_", name, "_ms")] = serve::percentile(values, 50);
  (*report)[absl::StrCat("p99_", name, "_ms")] = serve::percentile(values, 99);
}

}  // namespace

int serve_bench_main(int argc, char** argv) {
  BenchOptions options;
  CLI::App app("Loads an OpenAI-compatible server and reports latencies.");
  app.add_option("--url", options.url, "the server")
      ->check(
          [](const std::string& url) {
            return std::string(http::HttpUrl::parse(url).status().message());
          },
          "")
      ->type_name("URL")
      ->capture_default_str();
  app.add_option("--num-prompts", options.requests, "requests")
      ->check(command_line::whole_number(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--request-rate", options.rate,
                 "Poisson arrivals per second; 0: each of --max-concurrency clients sends its next "
                 "request when the last is answered")
      ->check(command_line::real_number(0, 1e6))
      ->capture_default_str();
  app.add_option("--max-concurrency", options.concurrency, "clients of the closed loop")
      ->check(command_line::whole_number(1, 1024))
      ->capture_default_str();
  app.add_option("--prompt-bytes", options.prompt_bytes, "length of a prompt's text")
      ->check(command_line::whole_number(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--output-len", options.output, "tokens per request")
      ->check(command_line::whole_number(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--seed", options.seed, "of prompts and arrivals")
      ->check(command_line::whole_number(0, UINT64_MAX))
      ->capture_default_str();
  app.add_option("--json", options.json_file, "write the report to this file")
      ->check(command_line::writable_file())
      ->type_name("FILE");
  if (const int status = command_line::parse(app, "baton serve_bench", argc, argv); status >= 0) {
    return status;
  }

  double seconds = 0;
  const std::vector<Sample> samples = run_load(options, &seconds);
  std::vector<double> ttft, tpot, itl, e2e;
  size_t input = 0, output = 0;
  for (const Sample& sample : samples) {
    if (!sample.ok) continue;
    ttft.push_back(sample.ttft_ms);
    e2e.push_back(sample.e2e_ms);
    if (sample.output > 1) tpot.push_back(sample.tpot_ms());
    itl.insert(itl.end(), sample.itl_ms.begin(), sample.itl_ms.end());
    input += sample.input;
    output += sample.output;
  }
  json report = {{"completed", ttft.size()},
                 {"failed", samples.size() - ttft.size()},
                 {"duration", seconds},
                 {"total_input_tokens", input},
                 {"total_output_tokens", output},
                 {"request_throughput", static_cast<double>(ttft.size()) / seconds},
                 {"output_throughput", static_cast<double>(output) / seconds}};
  summarize(&report, "ttft", ttft);
  summarize(&report, "tpot", tpot);
  summarize(&report, "itl", itl);
  summarize(&report, "e2el", e2e);
  for (const auto& [key, value] : report.items()) {
    std::printf("%-22s %s\n", key.c_str(),
                value.is_number_float() ? std::to_string(value.get<double>()).c_str()
                                        : value.dump().c_str());
  }
  if (!options.json_file.empty()) {
    const std::string text = report.dump() + "\n";
    const absl::Status status = write_file_atomically(options.json_file, std::string_view(text));
    if (!status.ok()) {
      std::fprintf(stderr, "baton serve_bench: %s\n", std::string(status.message()).c_str());
      return 1;
    }
  }
  if (ttft.size() == samples.size()) return 0;
  std::fprintf(stderr, "baton serve_bench: %zu of %zu requests failed; is %s serving?\n",
               samples.size() - ttft.size(), samples.size(), options.url.c_str());
  return 1;
}

}  // namespace baton::engine::commands
