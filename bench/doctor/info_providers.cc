// Probing providers as a worker would make them.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "bench/doctor/info.h"
#include "bench/report/dialogue.h"
#include "transport/address.h"
#include "transport/base/child.h"
#include "transport/base/environment.h"
#include "transport/base/limits/refusals.h"
#include "transport/base/unique_fd.h"
#include "transport/provider.h"
#include "transport/settings.h"

namespace baton::bench {
namespace {

// Providers that only programs have which were built with their libraries.
struct Optional {
  const char* name;
  const char* packages;
};
constexpr std::array kOptional = {Optional{"verbs", "libibverbs-dev"},
                                  Optional{"ucx", "libucx-dev"}};

Json report(const std::string& name, bool usable, int rank, const std::string& detail) {
  return {{"name", name}, {"usable", usable}, {"rank", rank}, {"detail", detail}};
}

Json probe(const std::string& name, const ProviderFactory& factory,
           const ProviderContext& context) {
  const std::unique_ptr<Provider> provider = factory(context);
  const Capabilities can = provider->capabilities();
  if (!can.available) return report(name, false, can.rank, can.detail);
  const auto where = provider->listen();
  if (!where.ok()) return report(name, false, can.rank, std::string(where.status().message()));
  const std::string_view why = why_on_request(name);
  return report(name, true, can.rank,
                why.empty() ? provider->capabilities().detail
                            : absl::StrCat(provider->capabilities().detail,
                                           "; used where it is asked for (--provider ", name,
                                           "): ", std::string(why)));
}

// Probes in a child process: a provider that workers use only on request (UCX) can abort its
// process, and a user who only asks for a list has not asked for that provider.
Json probe_apart(const std::string& name, const ProviderFactory& factory,
                 const ProviderContext& context) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return report(name, false, 0, base::refusal("pipe", errno));
  base::UniqueFd from(ends[0]), to(ends[1]);
  const pid_t child = base::fork_child();
  if (child < 0) return report(name, false, 0, base::refusal("fork", errno));
  if (child == 0) {
    const std::string text = probe(name, factory, context).dump();
    [[maybe_unused]] const ssize_t put = write(to.get(), text.data(), text.size());
    _exit(0);
  }
  to.reset();
  std::string text;
  std::array<char, 4096> some{};
  for (ssize_t got = 1; got > 0 || (got < 0 && errno == EINTR);) {
    got = read(from.get(), some.data(), some.size());
    if (got > 0) text.append(some.data(), static_cast<size_t>(got));
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  Json found = Json::parse(text, nullptr, false);
  if (!found.is_discarded()) return found;
  return report(
      name, false, 0,
      absl::StrCat("loading it ended the process that tried",
                   WIFSIGNALED(status) ? absl::StrCat(" (", strsignal(WTERMSIG(status)), ")") : "",
                   ": use another provider, or upgrade its library"));
}

}  // namespace

Json probe_providers() {
  std::vector<Json> found;
  const WorkerUid uid = WorkerUid::random();
  const auto key = ClusterKey::for_this_user();
  auto counters = CounterTable::create(uid);
  const absl::Status status = key.ok() ? counters.status() : key.status();
  RegionTable regions(uid);
  for (const auto& [name, factory] : registered_providers()) {
    if (!status.ok()) {
      found.push_back(report(name, false, 0, std::string(status.message())));
      continue;
    }
    HelloInfo self;
    self.uid = uid;
    self.name = "baton-info";
    const ProviderContext context{.clock = Clock::steady(),
                                  .key = *key,
                                  .self = self,
                                  .host_id = this_host_id(),
                                  .regions = regions,
                                  .counters = *counters,
                                  .listen_host = "",
                                  .listen_port = 0,
                                  .settings = {}};
    const auto& how = why_on_request(name).empty() ? probe : probe_apart;
    found.push_back(how(name, factory, context));
  }
  for (const Optional& optional : kOptional) {
    const bool there = std::any_of(found.begin(), found.end(),
                                   [&](const Json& p) { return p["name"] == optional.name; });
    if (there) continue;
    found.push_back(report(optional.name, false, 0,
                           absl::StrCat("not part of this program: `apt-get install ",
                                        optional.packages, "` and build again")));
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Json& a, const Json& b) { return a["rank"] > b["rank"]; });
  return found;
}

namespace {

std::string or_dash(const std::string& text) { return text.empty() ? "-" : text; }

// "1024 KiB", "auto", "-".
std::string with_unit(const Json& row) {
  const std::string value = text_of(row, "default"), unit = text_of(row, "unit");
  return or_dash(value.empty() || unit.empty() ? value : absl::StrCat(value, " ", unit));
}

std::string cell(const std::string& text) { return absl::StrReplaceAll(text, {{"|", "\\|"}}); }

constexpr const char* kMarkdownHead = R"(# Settings and environment variables

Made by `baton info --settings --markdown`; a test fails where this page and the program differ.

A setting is given as `--set NAME=VALUE` to every command that makes workers, or as `WorkerOptions::settings`. One that
does not exist, or a value out of range, is an error that names valid ones. `baton info
--settings` prints the same of the program at hand, `--json` for other programs.
)";

constexpr const char* kMarkdownEnvironment = R"(
## Environment variables

A `BATON_*` variable that is not here is an error to the `baton` command, and a warning in the log of
any other program.

| variable | default | meaning |
|---|---|---|
)";

}  // namespace

Json settings_info() {
  Json settings = Json::array(), environment = Json::array();
  for (const Setting& row : known_settings()) {
    settings.push_back({{"name", std::string(row.name)},
                        {"unit", std::string(row.unit)},
                        {"default", std::string(row.standard)},
                        {"range", row.range()},
                        {"meaning", std::string(row.meaning)}});
  }
  for (const base::EnvironmentVariable& row : base::known_environment()) {
    environment.push_back({{"name", std::string(row.name)},
                           {"default", std::string(row.standard)},
                           {"meaning", std::string(row.meaning)}});
  }
  return {{"settings", std::move(settings)}, {"environment", std::move(environment)}};
}

std::string settings_text(const Json& info) {
  std::string out = "Settings (--set NAME=VALUE; WorkerOptions::settings)\n";
  for (const Json& row : info["settings"]) {
    const std::string range = text_of(row, "range");
    absl::StrAppend(&out, absl::StrFormat("  %-22s %-11s %s%s\n", text_of(row, "name"),
                                          with_unit(row), text_of(row, "meaning"),
                                          range.empty() ? "" : absl::StrCat(" [", range, "]")));
  }
  absl::StrAppend(&out, "\nEnvironment variables\n");
  for (const Json& row : info["environment"]) {
    absl::StrAppend(&out, absl::StrFormat("  %-22s %s (default: %s)\n", text_of(row, "name"),
                                          text_of(row, "meaning"), text_of(row, "default")));
  }
  return out;
}

std::string settings_markdown(const Json& info) {
  std::string out = kMarkdownHead, provider;
  for (const Json& row : info["settings"]) {
    const std::string name = text_of(row, "name");
    if (const std::string of = name.substr(0, name.find('.')); of != provider) {
      provider = of;
      absl::StrAppend(&out, "\n## ", of,
                      "\n\n| setting | default | takes | meaning |\n|---|---|---|---|\n");
    }
    absl::StrAppend(&out, "| `", name, "` | ", with_unit(row), " | ",
                    or_dash(text_of(row, "range")), " | ", cell(text_of(row, "meaning")), " |\n");
  }
  absl::StrAppend(&out, kMarkdownEnvironment);
  for (const Json& row : info["environment"]) {
    absl::StrAppend(&out, "| `", text_of(row, "name"), "` | ", cell(text_of(row, "default")), " | ",
                    cell(text_of(row, "meaning")), " |\n");
  }
  return out;
}

}  // namespace baton::bench
