// The columns of a command's help.
#include "engine/command_line/command_line.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"

namespace baton::engine::command_line {
namespace {

constexpr size_t kColumn = 34;  // where descriptions begin
constexpr size_t kWidth = 100;

// The placeholder of the value: the range or the words that a check allows, which CLI11 puts behind
// the name of the type and a colon, or that name where it says more.
std::string type_of(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  constexpr std::string_view kPlain[] = {"INT", "UINT", "FLOAT", "TEXT"};
  const size_t colon = type.find(':');
  const std::string name = type.substr(0, colon);
  const bool plain =
      name.size() == 1 || std::find(std::begin(kPlain), std::end(kPlain), name) != std::end(kPlain);
  const bool range = colon != std::string::npos && colon + 1 < type.size() &&
                     (type[colon + 1] == '{' || absl::ascii_isdigit(type[colon + 1]));
  if (range) return plain ? type.substr(colon + 1) : name;
  return plain && name != "TEXT" ? "N" : type;
}

std::string names_of(const std::set<CLI::Option*>& options) {
  return absl::StrJoin(options, ", ", [](std::string* out, const CLI::Option* option) {
    out->append(option->get_name());
  });
}

// Words from `text` in lines of at most `width`.
std::string wrapped(const std::string& text, size_t width) {
  std::string out;
  size_t column = 0;
  for (const auto word : absl::StrSplit(text, ' ')) {
    if (column > 0 && column + 1 + word.size() > width) {
      out += '\n';
      column = 0;
    } else if (column > 0) {
      out += ' ';
      ++column;
    }
    absl::StrAppend(&out, word);
    column += word.size();
  }
  return out;
}

// The description, the default and what the option goes with.
std::string description_of(const CLI::Option& option) {
  std::string text = option.get_description();
  if (!option.get_default_str().empty()) {
    absl::StrAppend(&text, " [", option.get_default_str(), "]");
  }
  if (!option.get_needs().empty()) {
    absl::StrAppend(&text, " (with ", names_of(option.get_needs()), ")");
  }
  if (!option.get_excludes().empty()) {
    absl::StrAppend(&text, " (not with ", names_of(option.get_excludes()), ")");
  }
  return text;
}

}  // namespace

HelpText::HelpText() { column_width(kColumn); }

std::string HelpText::make_option_name(const CLI::Option* option, bool is_positional) const {
  if (is_positional) return option->get_name(true, false);
  std::vector<std::string> names;
  for (const std::string& name : option->get_snames()) names.push_back("-" + name);
  for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  return absl::StrJoin(names, ", ");
}

std::string HelpText::make_option_opts(const CLI::Option* option) const {
  if (option->get_items_expected_max() == 0) return "";  // a flag
  const bool many = option->get_expected_max() == CLI::detail::expected_max_vector_size &&
                    option->get_allow_extra_args();
  return absl::StrCat(" ", type_of(*option), many ? " ..." : "");
}

std::string HelpText::make_option_desc(const CLI::Option* option) const {
  return wrapped(description_of(*option), kWidth - kColumn);
}

std::string option_table(const CLI::App& app) {
  const HelpText help;
  const auto field = [](const std::string& text) {
    return absl::StrReplaceAll(text, {{"\n", "\\n"}, {"\t", " "}});
  };
  std::string out = absl::StrCat("about\t", field(app.get_description()), "\n");
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_group().empty()) continue;  // hidden
    const bool positional = option->get_positional();
    absl::StrAppend(&out, positional ? "argument\t" : "option\t",
                    help.make_option_name(option, positional), "\t",
                    absl::StripAsciiWhitespace(help.make_option_opts(option)), "\t",
                    field(description_of(*option)), "\n");
  }
  if (!app.get_footer().empty()) absl::StrAppend(&out, "footer\t", field(app.get_footer()), "\n");
  return out;
}

}  // namespace baton::engine::command_line
