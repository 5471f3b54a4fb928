// `baton doctor`: runs the checks, prints the findings, reads the command line.
#include "bench/doctor/doctor.h"

#include <algorithm>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/doctor/info.h"
#include "transport/base/nearest_name.h"

namespace baton::bench {
namespace {

using Grade = Check::Grade;

const char* name_of(Grade grade) {
  constexpr const char* kNames[] = {"ok", "warn", "fail"};
  static_assert(std::size(kNames) == static_cast<size_t>(Grade::kFail) + 1);
  return base::name_at(kNames, grade, "");
}

void check_providers(const Json& info, const std::string& wanted, std::vector<Check>& out) {
  bool any = false, known = false;
  std::vector<std::string> names;
  for (const Json& provider : info["providers"]) {
    const std::string name = provider["name"].get<std::string>();
    const std::string detail = provider["detail"].get<std::string>();
    const bool usable = provider["usable"].get<bool>();
    any = any || usable;
    names.push_back(name);
    known = known || name == wanted;
    const Grade grade = usable ? Grade::kOk : name == wanted ? Grade::kFail : Grade::kWarn;
    out.push_back({grade, absl::StrCat("provider ", name), name,
                   usable ? absl::StrCat("usable: ", detail) : detail, ""});
  }
  if (!any) {
    out.push_back({Grade::kFail, "providers", "", "none can be used",
                   "tcp works wherever there is a loopback device: `ip link set lo up`"});
  }
  if (!wanted.empty() && !known) {
    out.push_back({Grade::kFail, absl::StrCat("provider ", wanted), wanted,
                   absl::StrCat("there is no such provider", base::did_you_mean(wanted, names)),
                   "`baton info` lists them"});
  }
}

}  // namespace

std::vector<Check> examine(const Json& info, const std::string& provider) {
  std::vector<Check> out;
  check_providers(info, provider, out);
  check_rdma(info, out);
  check_limits(info, out);
  check_memory(info, out);
  check_kernel(info, out);
  check_gpus(info, out);
  if (!provider.empty()) {
    std::erase_if(out, [&](const Check& check) {
      return !check.provider.empty() && check.provider != provider;
    });
    return out;
  }
  // no option asked for this provider: that it cannot be used is no failure.
  for (Check& check : out) {
    if (check.grade == Grade::kFail && !check.provider.empty()) check.grade = Grade::kWarn;
  }
  return out;
}

bool failed(absl::Span<const Check> checks) {
  return std::any_of(checks.begin(), checks.end(),
                     [](const Check& check) { return check.grade == Grade::kFail; });
}

namespace {

size_t count(absl::Span<const Check> checks, Grade grade) {
  return static_cast<size_t>(std::count_if(
      checks.begin(), checks.end(), [grade](const Check& check) { return check.grade == grade; }));
}

}  // namespace

std::string doctor_text(absl::Span<const Check> checks) {
  size_t width = 0;
  for (const Check& check : checks) width = std::max(width, check.name.size());
  std::string out;
  for (const Check& check : checks) {
    absl::StrAppend(&out, absl::StrFormat("%-4s  %-*s  %s\n", name_of(check.grade),
                                          static_cast<int>(width), check.name, check.finding));
    if (!check.remedy.empty()) {
      absl::StrAppend(&out, std::string(width + 8, ' '), "-> ", check.remedy, "\n");
    }
  }
  absl::StrAppendFormat(
      &out, "summary: %u ok, %u warn, %u fail: %s\n", count(checks, Grade::kOk),
      count(checks, Grade::kWarn), count(checks, Grade::kFail),
      failed(checks) ? "fix what failed first" : "all checks that matter here passed");
  return out;
}

Json doctor_json(absl::Span<const Check> checks) {
  Json list = Json::array();
  for (const Check& check : checks) {
    Json entry = {
        {"name", check.name}, {"grade", name_of(check.grade)}, {"finding", check.finding}};
    if (!check.provider.empty()) entry["provider"] = check.provider;
    if (!check.remedy.empty()) entry["remedy"] = check.remedy;
    list.push_back(std::move(entry));
  }
  return {{"ok", !failed(checks)},
          {"summary",
           {{"ok", count(checks, Grade::kOk)},
            {"warn", count(checks, Grade::kWarn)},
            {"fail", count(checks, Grade::kFail)}}},
          {"checks", std::move(list)}};
}

int doctor_main(int argc, char** argv) {
  InfoOptions options;
  if (const int leave = parse_info(argc, argv, true, options); leave >= 0) return leave;
  const std::vector<Check> checks = examine(machine_info(options.root), options.provider);
  if (options.json) {
    if (absl::Status status = print_json(options, doctor_json(checks)); !status.ok()) {
      std::cerr << "baton doctor: " << status.message() << "\n";
      return 1;
    }
  } else {
    std::cout << doctor_text(checks) << std::flush;
  }
  return failed(checks) ? 1 : 0;
}

}  // namespace baton::bench
