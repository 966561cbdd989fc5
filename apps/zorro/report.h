#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace zorro::app {

using Json = nlohmann::ordered_json;

/// A table on stdout: columns as wide as their widest cell, numbers on the right.
class Table {
 public:
  explicit Table(std::vector<std::string> header);
  void add(std::vector<std::string> row);
  void print() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

/// printf's %.*f, %.*e and so on with one number.
std::string number_text(const char* format, double value);
/// "1.2 GF/s" and the like.
std::string rate_text(double flops_per_second);
/// "12.3 ms".
std::string seconds_text(double seconds);
/// Shortest text that reads back to the same double.
std::string exact_text(double value);

/// One object on stdout; numbers that are not finite become null.
void print_json(const Json& object);

}  // namespace zorro::app
