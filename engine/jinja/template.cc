// The public side of templates: errors as statuses, and transformers' two functions.
#include "engine/jinja/template.h"

#include <chrono>
#include <ctime>
#include <exception>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "engine/files/utf8.h"
#include "engine/jinja/arguments.h"
#include "engine/jinja/interpreter.h"

namespace baton::engine::jinja {
namespace {

// Today's date, for templates that tell the model: Python's datetime.now().strftime(), which knows
// microseconds and no time zone.
Value strftime_now(const Args& args) {
  const Arguments given("strftime_now", args, {"format"}, 1);
  const auto now = std::chrono::system_clock::now();
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  const auto micros =
      std::chrono::duration_cast<std::chrono::microseconds>(now.time_since_epoch()).count() %
      1000000;
  std::tm local{};
  localtime_r(&seconds, &local);
  const std::string format = absl::StrReplaceAll(
      given.text(0),
      {{"%%", "%%"}, {"%f", absl::StrFormat("%06d", micros)}, {"%z", ""}, {"%Z", ""}});
  char text[1024] = "";
  return std::string(text, std::strftime(text, sizeof text, format.c_str(), &local));
}

Value raise_exception(const Args& args) {
  const Arguments given("raise_exception", args, {"message"}, 1);
  throw Error(given.at(0).str());
}

bool is_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const Character c = decode_character(text, at);
    if (!c.valid) return false;
    at += c.bytes;
  }
  return true;
}

}  // namespace

absl::StatusOr<Template> Template::parse(std::string_view source) {
  if (!is_utf8(source)) return absl::InvalidArgumentError("the template is not UTF-8");
  try {
    return Template(std::make_shared<const Syntax>(jinja::parse(source)));
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(error.what());
  }
}

absl::StatusOr<std::string> Template::render(const nlohmann::ordered_json& values) const {
  try {
    Interpreter::Variables variables;
    variables["raise_exception"] = function("raise_exception", raise_exception);
    variables["strftime_now"] = function("strftime_now", strftime_now);
    for (const auto& [name, value] : values.items()) variables[name] = Value::of_json(value);
    return Interpreter(std::move(variables)).run(*syntax_);
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(error.what());
  }
}

}  // namespace baton::engine::jinja
