add_library(zorro_warnings INTERFACE)
target_compile_options(zorro_warnings INTERFACE -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wnon-virtual-dtor
                       -Wold-style-cast
                       # libstdc++ 12's own std::stable_sort uses what it deprecates; clang tells, g++ does not.
                       $<$<CXX_COMPILER_ID:Clang>:-Wno-deprecated-declarations>)

# zorro_layer(NAME [LAYERS ...] [TORCH] [PRIVATE_LIBRARIES ...]): objects of src/NAME, compiled once and used by the
# shared library and by the tests of each folder.
function(zorro_layer name)
  cmake_parse_arguments(arg "TORCH" "" "LAYERS;PRIVATE_LIBRARIES" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/${name}/*.cpp")
  add_library(zorro_${name} OBJECT ${sources})
  target_include_directories(zorro_${name}
    PUBLIC "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>" PRIVATE "${PROJECT_SOURCE_DIR}/src")
  target_link_libraries(zorro_${name} PRIVATE $<BUILD_INTERFACE:zorro_warnings> ${arg_PRIVATE_LIBRARIES})
  if(arg_TORCH)
    target_link_libraries(zorro_${name} PUBLIC zorro_torch)
  endif()
  set_property(TARGET zorro_${name} PROPERTY ZORRO_LIBRARIES "${arg_PRIVATE_LIBRARIES}")
endfunction()

# Adds the objects of layers, and what these link privately, to a target.
function(zorro_add_layers target)
  foreach(layer IN LISTS ARGN)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:zorro_${layer}>)
    get_target_property(libraries zorro_${layer} ZORRO_LIBRARIES)
    if(libraries)
      target_link_libraries(${target} PRIVATE ${libraries})
    endif()
  endforeach()
endfunction()

function(zorro_library name)
  cmake_parse_arguments(arg "" "" "LAYERS" ${ARGN})
  add_library(${name} SHARED)
  add_library(zorro::${name} ALIAS ${name})
  zorro_add_layers(${name} ${arg_LAYERS})
  target_include_directories(${name} PUBLIC "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>"
                             "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
  target_compile_features(${name} PUBLIC cxx_std_20)
  target_link_libraries(${name} PUBLIC zorro_torch)
endfunction()
