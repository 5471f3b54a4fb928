// softroce_faults: the programs of the fault cases across two machines, and their table.
//
//   softroce_faults target BOARD HOST          offers memory, until it is killed
//   softroce_faults sender BOARD HOST CASE     one case: prints a line of JSON; 1 if it failed
//   softroce_faults list                       the cases, in order
//   softroce_faults table < ROWS               a table in Markdown; 1 if a case failed
#include <iostream>
#include <string>

#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"
#include "tests/softroce/faults.h"

namespace {

using namespace baton::softroce;

std::string both(const nlohmann::json& shares) {
  std::string text;
  for (const auto& one : shares) {
    text += (text.empty() ? "" : " + ") + std::to_string(one.get<int>());
  }
  return text.empty() ? "" : text + " %";
}

int table() {
  std::cout
      << "| fault | what happened | noticed after | predicted | allowed | clock | bytes verified "
         "| rails before | after | verdict |\n|---|---|---|---|---|---|---|---|---|---|\n";
  std::string line;
  int failed = 0;
  size_t rows = 0;
  while (std::getline(std::cin, line)) {
    const auto row = nlohmann::json::parse(line, nullptr, false);
    if (!row.is_object()) continue;
    ++rows;
    if (!row.contains("verdict")) {  // killed, or crashed: see its log
      std::cout << "| " << row.value("case", "?") << " | | | | | | | | | FAILED: no result |\n";
      ++failed;
      continue;
    }
    const bool good = row["verdict"] == "ok";
    failed += good ? 0 : 1;
    const double predicted = row["predicted_ms"], noticed = row["noticed_ms"];
    const auto time = [](double value) {
      return value < 0 ? "" : absl::StrFormat("%.0f ms", value);
    };
    std::cout << absl::StrFormat(
        "| %s | %s | %s | %s | %s | x%.2f | %.1f MB | %s | %s | %s |\n",
        row["injected"].get<std::string>(), row["happened"].get<std::string>(), time(noticed),
        time(predicted), predicted < 0 ? "" : time(row["allowed_ms"]), row["clock"].get<double>(),
        row["verified_bytes"].get<double>() / 1e6, both(row["rails_before"]),
        both(row["rails_after"]), good ? "ok" : "FAILED: " + row["verdict"].get<std::string>());
  }
  return failed == 0 && rows > 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "table") return table();
  if (what == "list") {
    for (const Case& one : cases()) std::cout << one.name << "\n";
    return 0;
  }
  if (what == "target" && argc == 4) return run_target(argv[2], argv[3]);
  if (what == "sender" && argc == 5) {
    for (const Case& one : cases()) {
      if (argv[4] == std::string(one.name)) return run_sender(argv[2], argv[3], one);
    }
  }
  std::cerr << "usage: softroce_faults target BOARD HOST | sender BOARD HOST CASE | list | table\n";
  return 2;
}
